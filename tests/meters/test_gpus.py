"""The GPUs that can be simulated, by name, and what a reading says of one that was never measured."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memfix
from memfix.errors import UsageError
from memfix.meters.simulated.attention import unmeasured_backend
from memfix.meters.simulated.gpus import GPUS, get_gpu

ASSUMED = "no rule was measured on A100: its kernels are assumed to take what they do elsewhere"


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("H200", "H200"),
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("nvidia_a100", "A100"),
        ("rtx 4090", "RTX4090"),
        ("RTX-4090", "RTX4090"),
        ("NVIDIA rtx_3090", "RTX3090"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(written: str, name: str) -> None:
    assert get_gpu(written).name == name


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("A1000", "unknown GPU 'A1000'; did you mean 'A100'?"),
        ("rtx 4900", "unknown GPU 'rtx 4900'; did you mean 'RTX4090'?"),
        ("Tesla T4", "unknown GPU 'Tesla T4'; did you mean 'L4'?"),
    ],
)
def test_an_unknown_gpu_is_refused_with_a_suggestion(name: str, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        memfix.peak(matmul, gpu=name)
    assert str(refused.value) == message


def test_every_gpu_is_known_by_its_own_name() -> None:
    assert all(get_gpu(name).name == name for name in GPUS)


def matmul(device: str) -> Any:
    a, b = torch.empty(100, 50, device=device), torch.empty(50, 30, device=device)
    return lambda: a @ b


def test_a_reading_names_the_gpu_and_says_that_its_rules_are_assumed() -> None:
    reading = memfix.peak(matmul, gpu="a100")
    assert (reading.device, reading.peak_bytes) == ("A100", 100 * 30 * 4)
    assert reading.notes == (ASSUMED,)
    assert not reading.exact
    assert reading.at_least == reading.at_most == reading.peak_bytes  # nothing in it depends on the GPU


def test_an_operator_that_hides_nothing_is_exact_on_any_gpu() -> None:
    def build(device: str) -> Any:
        x = torch.empty(1000, device=device)
        return lambda: (x + 1).view(10, 100).exp()

    reading = memfix.peak(build, gpu="RTX4090")
    assert (reading.peak_bytes, reading.notes, reading.exact) == (8000, (), True)


def test_one_gpu_after_another_is_described_as_itself() -> None:
    def build(device: str) -> Any:
        seen.append(torch.cuda.get_device_capability())
        return lambda: torch.empty(1, device=device)

    seen: list[tuple[int, int]] = []
    for name in ("A100", "L4", "H200"):
        memfix.peak(build, gpu=name)
    assert seen == [(8, 0), (8, 9), (9, 0)]


def summed(device: str) -> Any:
    x = torch.empty(2**26, device=device)
    return lambda: x.sum()


def test_workspace_by_multiprocessors_is_bounded_by_half_and_twice_as_many() -> None:
    reading = memfix.peak(summed, gpu="A100")
    assert reading.notes == (
        "workspace by the number of multiprocessors, bounded by half and twice the 108 of A100: aten.sum.dim_IntList",
    )
    assert reading.at_most is not None
    assert reading.at_least == reading.peak_bytes < reading.at_most
    assert memfix.peak(summed, gpu="H200").exact


def test_a_kernel_whose_rule_does_not_cover_a_gpu_is_estimated_as_on_the_h200() -> None:
    def build(device: str) -> Any:
        x = torch.empty(2**20, device=device)
        return x.sort

    reading, on_h200 = (memfix.peak(build, gpu=gpu) for gpu in ("L4", "H200"))
    assert reading.peak_bytes == on_h200.peak_bytes
    assert reading.at_least == 2**20 * (4 + 8)  # the results alone
    assert reading.at_most == 2 * on_h200.peak_bytes - reading.at_least
    assert reading.notes[0] == (
        "CUB's tiles on a GPU of capability 8.9: aten.sort.default is assumed to take what it does on H200, bounded by "
        "none and twice that"
    )


def attended(device: str, backend: SDPBackend | None = None) -> Any:
    query = torch.empty(2, 8, 1024, 64, device=device, dtype=torch.bfloat16, requires_grad=True)

    def step() -> None:
        query.grad = None
        with sdpa_kernel(backend) if backend is not None else contextlib.nullcontext():
            F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    return step


def test_attention_is_bounded_by_the_backends_that_torch_may_prefer() -> None:
    reading = memfix.peak(attended, gpu="A100")
    assert unmeasured_backend(get_gpu("A100")) in reading.notes
    assert reading.at_least is not None
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        chosen = memfix.peak(partial(attended, backend=backend), gpu="A100")
        assert reading.at_least <= chosen.peak_bytes <= reading.highest_bytes


def test_a_doubt_without_bounds_leaves_none() -> None:
    def build(device: str) -> Any:
        a, b = torch.empty(100, 50, device=device), torch.empty(50, 30, device=device)

        def cyclic() -> object:
            held: list[Any] = [a @ b]
            held.append(held)  # only the collector frees it
            return None

        return cyclic

    reading = memfix.peak(build, gpu="A100")
    assert any("reference cycles" in note for note in reading.notes)
    assert (reading.exact, reading.at_least, reading.at_most) == (False, None, None)
