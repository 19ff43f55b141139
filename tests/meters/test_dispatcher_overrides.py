"""Operators take the path that a CUDA build takes, and have a fake where torch brings none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memfix

BF16 = torch.bfloat16


class Seen(TorchDispatchMode):
    """The names of the operators that come by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def operators_of(build: Any) -> set[str]:
    seen = Seen()

    def watched(device: str) -> Any:
        step = build(device)

        def under_watch() -> object:
            with seen:
                return step()

        return under_watch

    memfix.peak(watched, warmup=0)
    return seen.names


# ---------------------------------------------------------------- batch norm
def batch_norm(dtype: torch.dtype = torch.float32, *, pixels: int = 16, affine: bool = True, width: int = 8) -> Any:
    def build(device: str) -> Any:
        norm = nn.BatchNorm2d(width, affine=affine, device=device, dtype=dtype)
        x = torch.empty(4, width, pixels, pixels, device=device, dtype=dtype, requires_grad=True)
        upstream = torch.empty_like(x)

        def step() -> None:
            norm(x).backward(upstream)
            x.grad = None
            norm.zero_grad()

        return step

    return build


def test_batch_norm_in_float32_is_cudnns() -> None:
    seen = operators_of(batch_norm())
    assert {"cudnn_batch_norm", "cudnn_batch_norm_backward"} <= seen
    assert "native_batch_norm" not in seen


def test_batch_norm_in_bfloat16_is_torchs_own() -> None:
    seen = operators_of(batch_norm(BF16))
    assert {"native_batch_norm", "native_batch_norm_backward"} <= seen
    assert "cudnn_batch_norm" not in seen


def test_batch_norm_without_a_weight_is_torchs_own() -> None:
    assert "native_batch_norm" in operators_of(batch_norm(affine=False))


def test_batch_norm_without_cudnn_is_torchs_own() -> None:
    with torch.backends.cudnn.flags(enabled=False):
        assert "native_batch_norm" in operators_of(batch_norm())


def test_a_batch_norm_step_takes_its_output_its_statistics_and_its_gradients() -> None:
    reading = memfix.peak(batch_norm())
    image, channel = 4 * 8 * 16 * 16 * 4, 8 * 4
    assert reading.peak_bytes == 2 * image + 4 * channel  # mean, inverse deviation, two parameter gradients


def test_batch_norm_of_a_transposed_image_keeps_the_copy_for_backward() -> None:
    def build(device: str) -> Any:
        norm = nn.BatchNorm2d(8, device=device)
        x = torch.empty(4, 8, 16, 16, device=device).transpose(2, 3)
        return lambda: norm(x)

    image, channel = 4 * 8 * 16 * 16 * 4, 8 * 4
    assert memfix.peak(build).held_bytes == 2 * image + 2 * channel


# ---------------------------------------------------------------- samples of an image
@pytest.mark.parametrize(
    ("dtype", "options", "by_cudnn"),
    [
        (torch.float32, {"align_corners": True}, True),
        (torch.float32, {"align_corners": False}, False),
        (torch.float32, {"align_corners": True, "mode": "nearest"}, False),
        (torch.float32, {"align_corners": True, "padding_mode": "border"}, False),
        (BF16, {"align_corners": True}, False),
    ],
)
def test_grid_sample_is_cudnns_where_a_cuda_build_prefers_it(dtype: torch.dtype, options: Any, by_cudnn: bool) -> None:
    def build(device: str) -> Any:
        x = torch.empty(4, 8, 16, 16, device=device, dtype=dtype, requires_grad=True)
        grid = torch.empty(4, 5, 5, 2, device=device, dtype=dtype)
        upstream = torch.empty(4, 8, 5, 5, device=device, dtype=dtype)

        def step() -> None:
            F.grid_sample(x, grid, **options).backward(upstream)
            x.grad = None

        return step

    seen = operators_of(build)
    sampler = "cudnn_grid_sampler" if by_cudnn else "grid_sampler_2d"
    assert seen & {"cudnn_grid_sampler", "grid_sampler_2d"} == {sampler}
    assert f"{sampler}_backward" in seen


@pytest.mark.parametrize(
    ("dtype", "image", "weight", "expected"),
    [
        (torch.bfloat16, torch.channels_last, torch.channels_last, torch.channels_last),
        (torch.float32, torch.channels_last, torch.contiguous_format, torch.channels_last),
        (torch.float32, torch.contiguous_format, torch.channels_last, torch.channels_last),
        (torch.float32, torch.contiguous_format, torch.contiguous_format, torch.contiguous_format),
        (torch.float64, torch.channels_last, torch.channels_last, torch.contiguous_format),
    ],
)
def test_a_convolution_lies_as_cudnn_lays_it(dtype: torch.dtype, image: Any, weight: Any, expected: Any) -> None:
    def build(device: str) -> Any:
        x = torch.empty(4, 6, 9, 9, device=device, dtype=dtype).to(memory_format=image)
        w = torch.empty(8, 6, 3, 3, device=device, dtype=dtype).to(memory_format=weight)

        def step() -> None:
            assert F.conv2d(x, w).is_contiguous(memory_format=expected)

        return step

    memfix.peak(build)


def test_samples_of_an_image_take_their_result() -> None:
    def build(device: str) -> Any:
        x, grid = torch.empty(4, 8, 16, 16, device=device), torch.empty(4, 5, 6, 2, device=device)
        return lambda: F.grid_sample(x, grid, align_corners=True)

    assert memfix.peak(build).peak_bytes == 4 * 8 * 5 * 6 * 4


# ---------------------------------------------------------------- one_hot
def test_one_hot_writes_ones_into_zeros() -> None:
    def build(device: str) -> Any:
        ids = torch.zeros(100, dtype=torch.int64, device=device)
        return lambda: F.one_hot(ids, 10)

    assert memfix.peak(build).peak_bytes == 100 * 10 * 8
    assert operators_of(build) >= {"new_zeros", "scatter_"}


def test_one_hot_has_as_many_classes_as_its_values_need() -> None:
    def build(device: str) -> Any:
        ids = torch.arange(100, device=device) % 7
        return lambda: F.one_hot(ids)

    reading = memfix.peak(build)
    assert reading.held_bytes == 100 * 7 * 8
    assert reading.exact


# ---------------------------------------------------------------- fakes that torch lacks
def test_a_gru_cell_keeps_its_gates_and_what_it_made_of_them_for_backward() -> None:
    def build(device: str) -> Any:
        cell = nn.GRUCell(32, 16, device=device)
        x, hidden = torch.empty(4, 32, device=device), torch.empty(4, 16, device=device)
        return lambda: cell(x, hidden)

    assert "_thnn_fused_gru_cell" in operators_of(build)
    assert memfix.peak(build).held_bytes == (4 * 16 + 4 * 5 * 16 + 2 * 4 * 3 * 16) * 4


def test_the_gradients_of_a_gru_cell_are_as_large_as_its_parameters() -> None:
    def build(device: str) -> Any:
        cell = nn.GRUCell(32, 16, device=device)
        x, hidden = torch.empty(4, 32, device=device), torch.empty(4, 16, device=device)
        return lambda: cell(x, hidden).sum().backward()

    reading = memfix.peak(build, warmup=0)
    assert reading.leaked_bytes == (48 * 32 + 48 * 16 + 48 + 48) * 4


@pytest.mark.parametrize("operator", [torch.cummax, torch.cummin])
def test_a_running_extremum_takes_values_and_indices(operator: Any) -> None:
    def build(device: str) -> Any:
        x = torch.empty(100, 50, device=device)
        return lambda: operator(x, 1)

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.held_bytes) == (100 * 50 * (4 + 8), 100 * 50 * (4 + 8))


FUSED_ADAGRAD = pytest.param(
    torch.optim.Adagrad,
    marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="before torch 2.13 it is fused on a CPU only"),
)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, FUSED_ADAGRAD, torch.optim.AdamW])
def test_a_fused_optimizer_takes_nothing_of_its_own(optimizer: Any) -> None:
    def build(device: str) -> Any:
        weight = nn.Parameter(torch.empty(1000, 1000, device=device))
        weight.grad = torch.empty(1000, 1000, device=device)
        return optimizer([weight], lr=0.1, fused=True).step

    assert memfix.peak(build).peak_bytes == 0


@pytest.mark.parametrize("name", ["exponential_", "cauchy_", "log_normal_", "normal_", "uniform_", "geometric_"])
def test_numbers_are_drawn_in_place_from_a_generator(name: str) -> None:
    def build(device: str) -> Any:
        logits = torch.empty(100, 100, device=device)

        def step() -> object:
            generator = torch.Generator(device).manual_seed(1)
            noise = torch.empty(logits.shape, device=logits.device)
            getattr(noise, name)(*([0.5] if name == "geometric_" else []), generator=generator)
            return (logits - noise.log()).argmax(-1)

        return step

    reading = memfix.peak(build)
    assert reading.exact
    assert reading.peak_bytes == 3 * 40_000


# ---------------------------------------------------------------- operators for which torch has no fake
def test_a_net_that_learns_to_be_quantized_is_measured() -> None:
    def build(device: str) -> Any:
        weight = torch.empty(30, 500, device=device, requires_grad=True)
        scale, zero = torch.ones(30, device=device), torch.zeros(30, dtype=torch.int32, device=device)
        one, none = (torch.ones(1, device=device) * n for n in (1, 0))

        def step() -> None:
            by_channel = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -128, 127)
            torch._fake_quantize_learnable_per_tensor_affine(by_channel, one, none, 0, 255).sum().backward()
            weight.grad = None

        return step

    assert memfix.peak(build).peak_bytes >= 3 * 30 * 500 * 4


@pytest.mark.parametrize("name", ["Adam", "AdamW", "Adagrad"])
def test_a_fused_optimizer_takes_a_rate_on_the_gpu(name: str) -> None:
    def build(device: str) -> Any:
        weight = torch.empty(1000, device=device, requires_grad=True)
        weight.grad = torch.empty_like(weight)
        rate = 0.1 if name == "Adagrad" else torch.tensor(0.1, device=device)
        return getattr(torch.optim, name)([weight], lr=rate, fused=True).step

    reading = memfix.peak(build)
    assert (reading.peak_bytes, reading.exact) == (0, name != "Adagrad")


def test_batch_norm_over_ranks_takes_its_output_and_statistics() -> None:
    def build(device: str) -> Any:
        norm = nn.SyncBatchNorm(8, device=device)
        x = torch.empty(4, 8, 16, 16, device=device)
        return lambda: norm(x)

    image, channel = 4 * 8 * 16 * 16 * 4, 8 * 4
    reading = memfix.peak(build, world_size=4)
    assert image + 2 * channel < reading.held_bytes < image + 20 * channel


def test_binomial_numbers_are_drawn() -> None:
    reading = memfix.peak(lambda device: lambda: torch.binomial(*(torch.ones(1000, device=device),) * 2))
    assert reading.peak_bytes == 2 * 4000


@pytest.mark.parametrize("sizes", [(), (1,), (1, 1), (3, 1), (1, 4), (2, 3, 1)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_a_norm_has_the_axes_that_are_left(sizes: tuple[int, ...], keepdim: bool) -> None:
    for dim in (None, -1, 0, *([(-1, 0)] if len(sizes) > 1 else [])):
        for dtype in (torch.float32, torch.complex64):
            real = torch.linalg.vector_norm(torch.ones(sizes, dtype=dtype), dim=dim, keepdim=keepdim)
            found: list[Any] = []

            def build(device: str, dtype: Any = dtype, dim: Any = dim, found: list[Any] = found) -> Any:
                given = torch.ones(sizes, dtype=dtype, device=device)
                return lambda: found.append(torch.linalg.vector_norm(given, dim=dim, keepdim=keepdim))

            memfix.peak(build)
            assert {(each.shape, each.dtype) for each in found} == {(real.shape, real.dtype)}
