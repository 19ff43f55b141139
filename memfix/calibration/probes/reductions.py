"""Reductions along every axis, around the lengths where torch splits them over blocks, and beyond 32-bit offsets."""

from __future__ import annotations

from functools import partial

import torch

from .registry import Step, bf16, c64, c128, f16, f32, f64, i8, i32, i64, probe


def _ones(device: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor of ones. Any dtype is filled without a temporary."""
    return torch.ones(shape, dtype=dtype, device=device)


def _matrix_of_ones(device: str, dtype: torch.dtype) -> torch.Tensor:
    return _ones(device, (3000, 4096), dtype)


# just below and at the length from which reductions are split over blocks, and far longer; some are no power of two
_LENGTHS = (131_071, 131_072, 131_073, 1_000_003, 1 << 24)
_HIGH = ((65_536, 8192), (65_537, 1022), (100_000, 33), (4_194_304, 64), (300, 100_000))
_WIDE = ((1, 1 << 24), (2, 1 << 23), (7, 1_000_003), (64, 1 << 18), (8192, 4096))

probe("of_all", of=("sum", "argmax"), length=_LENGTHS)(
    lambda device, of, length: getattr(_ones(device, (length,), bf16), of)
)
probe("along_the_first_axis", of=("sum", "argmax"), shape=_HIGH)(
    lambda device, of, shape: partial(getattr(_ones(device, shape, bf16), of), dim=0)
)
probe("along_the_last_axis", of=("sum",), shape=_WIDE)(
    lambda device, of, shape: partial(getattr(_ones(device, shape, f32), of), dim=-1)
)


@probe(dims=((0, 1), (0, 2), (1,)), layout=("contiguous", "permuted", "slice", "repeated"))
def _along_axes(device: str, dims: tuple[int, ...], layout: str) -> Step:
    x = _ones(device, (512, 130, 1032), f32)
    if layout == "permuted":
        x = x.permute(2, 0, 1)
    if layout == "slice":
        x = x[:, :, 3:1027]
    if layout == "repeated":
        x = _ones(device, (512, 1, 1032), f32).expand(512, 130, 1032)
    return partial(x.sum, dims)


probe("sum_of", dtype=(torch.bool, i8, i32, i64, f16, f32, f64, c64, c128))(
    lambda device, dtype: partial(lambda x: (x.sum(), x.sum(0)), _matrix_of_ones(device, dtype))
)
probe("sum_to", dtype=(f16, bf16, i32), to=(f32, f64))(
    lambda device, dtype, to: partial(
        lambda x: (x.sum(0, dtype=to), torch.prod(x, 0, dtype=to)), _matrix_of_ones(device, dtype)
    )
)
probe("norm_of", dtype=(bf16, f64, c64, c128), order=(0, 2, float("inf")))(
    lambda device, dtype, order: partial(torch.linalg.vector_norm, _matrix_of_ones(device, dtype), order, dim=0)
)
probe("moments_of", dtype=(f16, f32, f64, c64))(
    lambda device, dtype: partial(
        lambda x: (torch.var(x, 0), torch.std_mean(x, 0), torch.var_mean(x)), _matrix_of_ones(device, dtype)
    )
)
probe("extrema_of", dtype=(i8, bf16, f32, i64))(
    lambda device, dtype: partial(
        lambda x: (x.max(0), x.min(), x.aminmax(), x.aminmax(dim=0), x.amin(0), x.argmin(0), x.any(0), x.all()),
        _matrix_of_ones(device, dtype),
    )
)
probe("of_a_transposed", dtype=(f32, torch.bool))(
    lambda device, dtype: partial(
        lambda x: (x.max(), x.to(f32).argmax(), torch.count_nonzero(x, 0), torch.count_nonzero(x)),
        _matrix_of_ones(device, dtype).t(),
    )
)
probe("equality", rows=(1, 3000))(
    lambda device, rows: partial(torch.equal, *(_ones(device, (rows, 4096), f32) for _ in range(2)))
)


@probe(dtype=(f32, f16, i32))
def _others(device: str, dtype: torch.dtype) -> Step:
    x = _matrix_of_ones(device, dtype)
    if dtype == i32:
        return x.trace
    return lambda: (torch.trace(x), torch.renorm(x, 2, 0, 1.0), torch.nansum(x, 0), torch.prod(x), torch.dist(x, x + 1))


@probe(rows=(1, 1000))
def _norm_of_single_elements(device: str, rows: int) -> Step:
    x, z = _ones(device, (rows, 1), f16), _ones(device, (rows, 1), c64)
    return lambda: (
        torch.linalg.vector_norm(x, dim=1, dtype=f64),
        torch.linalg.vector_norm(z, dim=1),
        _ones(device, (1,), f32).any(),
    )


# ---------------------------------------------------------------- beyond 32-bit offsets
probe("of_all_in_pieces", length=((1 << 30) + 2, (1 << 31) + 1))(
    lambda device, length: partial(
        lambda x: (x.sum(), x.sum(dtype=f32), x.amax(), x.argmax(), torch.linalg.vector_norm(x)),
        _ones(device, (length,), bf16),
    )
)
probe("along_an_axis_in_pieces", shape=((300_001, 4096), (1024, 1_100_001)), dim=(0, 1))(
    lambda device, shape, dim: partial(
        lambda x: (x.sum(dim), x.max(dim), torch.var(x, dim)), _ones(device, shape, bf16)
    )
)
probe("of_a_mask_in_pieces")(
    lambda device: partial(lambda x: (x.sum(), x.sum(0)), _ones(device, (65_536, 8192), torch.bool))
)
