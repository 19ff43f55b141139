"""The GPUs that can be simulated, by name, and what a reading says of one that was never measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import memfix
from memfix.errors import UsageError
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
