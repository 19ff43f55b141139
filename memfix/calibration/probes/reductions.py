"""Reductions: along every axis, around the lengths where torch splits them over blocks, and larger than 32 bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...meters.base import Step
from .registry import probe

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
i8, i32, i64, c64, c128 = torch.int8, torch.int32, torch.int64, torch.complex64, torch.complex128


def _filled(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Of any dtype, without taking more than the tensor itself."""
    return torch.ones(shape, dtype=dtype, device=device)


_REDUCTIONS: dict[str, Callable[..., Any]] = {
    "sum": torch.sum,
    "norm": torch.linalg.vector_norm,
    "var": torch.var,
    "amax": torch.amax,
    "argmax": torch.argmax,
}
# just too short and just long enough to split, and far longer; some are no power of two
_LENGTHS = (131_071, 131_072, 131_073, 1_000_003, 1 << 24)


@probe(of=("sum", "argmax"), length=_LENGTHS)
def _of_all(device: str, of: str, length: int) -> Step:
    x = _filled(device, (length,), bf16)
    return lambda: _REDUCTIONS[of](x)


@probe(of=("sum", "argmax"), shape=((65_536, 8192), (65_537, 1022), (100_000, 33), (4_194_304, 64), (300, 100_000)))
def _along_the_first_axis(device: str, of: str, shape: tuple[int, int]) -> Step:
    x = _filled(device, shape, bf16)
    return lambda: _REDUCTIONS[of](x, dim=0)


@probe(of=("sum",), shape=((1, 1 << 24), (2, 1 << 23), (7, 1_000_003), (64, 1 << 18), (8192, 4096)))
def _along_the_last_axis(device: str, of: str, shape: tuple[int, int]) -> Step:
    x = _filled(device, shape, f32)
    return lambda: _REDUCTIONS[of](x, dim=-1)


@probe(dims=((0, 1), (0, 2), (1,)), layout=("contiguous", "permuted", "slice", "repeated"))
def _along_axes(device: str, dims: tuple[int, ...], layout: str) -> Step:
    x = _filled(device, (512, 130, 1032), f32)
    if layout == "permuted":
        x = x.permute(2, 0, 1)
    if layout == "slice":
        x = x[:, :, 3:1027]
    if layout == "repeated":
        x = _filled(device, (512, 1, 1032), f32).expand(512, 130, 1032)
    return lambda: x.sum(dims)


@probe(dtype=(torch.bool, i8, i32, i64, f16, f32, f64, c64, c128))
def _sum_of(device: str, dtype: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    return lambda: (x.sum(), x.sum(0))


@probe(dtype=(f16, bf16, i32), to=(f32, f64))
def _sum_to(device: str, dtype: torch.dtype, to: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    return lambda: (x.sum(0, dtype=to), torch.prod(x, 0, dtype=to))


@probe(dtype=(bf16, f64, c64, c128), order=(0, 2, float("inf")))
def _norm_of(device: str, dtype: torch.dtype, order: float) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    return lambda: torch.linalg.vector_norm(x, order, dim=0)


@probe(dtype=(f16, f32, f64, c64))
def _moments_of(device: str, dtype: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    return lambda: (torch.var(x, 0), torch.std_mean(x, 0), torch.var_mean(x))


@probe(dtype=(i8, bf16, f32, i64))
def _extrema_of(device: str, dtype: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    return lambda: (x.max(0), x.min(), x.aminmax(), x.aminmax(dim=0), x.amin(0), x.argmin(0), x.any(0), x.all())


@probe(dtype=(f32, torch.bool))
def _of_a_transposed(device: str, dtype: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype).t()
    return lambda: (
        x.max(),
        x.to(f32).argmax(),
        torch.count_nonzero(x, 0),
        torch.count_nonzero(x),
    )


@probe(rows=(1, 3000))
def _equality(device: str, rows: int) -> Step:
    x, y = _filled(device, (rows, 4096), f32), _filled(device, (rows, 4096), f32)
    return lambda: torch.equal(x, y)


@probe(dtype=(f32, f16, i32))
def _others(device: str, dtype: torch.dtype) -> Step:
    x = _filled(device, (3000, 4096), dtype)
    if dtype == i32:
        return lambda: torch.trace(x)
    return lambda: (torch.trace(x), torch.renorm(x, 2, 0, 1.0), torch.nansum(x, 0), torch.prod(x), torch.dist(x, x + 1))


@probe(rows=(1, 1000))
def _norm_of_single_elements(device: str, rows: int) -> Step:
    x, z = _filled(device, (rows, 1), f16), _filled(device, (rows, 1), c64)
    return lambda: (
        torch.linalg.vector_norm(x, dim=1, dtype=f64),
        torch.linalg.vector_norm(z, dim=1),
        _filled(device, (1,), f32).any(),
    )


# ---------------------------------------------------------------- larger than 32-bit offsets
@probe(length=((1 << 30) + 2, (1 << 31) + 1))
def _of_all_in_pieces(device: str, length: int) -> Step:
    x = _filled(device, (length,), bf16)
    return lambda: (x.sum(), x.sum(dtype=f32), x.amax(), x.argmax(), torch.linalg.vector_norm(x))


@probe(shape=((300_001, 4096), (1024, 1_100_001)), dim=(0, 1))
def _along_an_axis_in_pieces(device: str, shape: tuple[int, int], dim: int) -> Step:
    x = _filled(device, shape, bf16)
    return lambda: (x.sum(dim), x.max(dim), torch.var(x, dim))


@probe()
def _of_a_mask_in_pieces(device: str) -> Step:
    x = _filled(device, (65_536, 8192), torch.bool)
    return lambda: (x.sum(), x.sum(0))
