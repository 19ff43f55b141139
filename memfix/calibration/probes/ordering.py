"""Sorting, selecting, searching, permuting, sampling and scanning, on both sides of every threshold of their rules."""

from __future__ import annotations

from typing import Any

import torch

from ...meters.base import Step
from .registry import probe

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
u8, i32, i64 = torch.uint8, torch.int32, torch.int64


def _values(device: str, *shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """Values of ``dtype`` of which hardly two neighbours are equal."""
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype, device=device)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, device=device).to(dtype)


def _strided(device: str, rows: int, columns: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """A gap after every element."""
    return _values(device, rows, 2 * columns, dtype=dtype)[:, ::2]


# ---------------------------------------------------------------- sorting
@probe(rows=(1, 2, 127, 128), columns=(4097,), dtype=(f32, i64))
def _sort(device: str, rows: int, columns: int, dtype: torch.dtype) -> Step:
    tensor = _values(device, rows, columns, dtype=dtype)
    return lambda: tensor.sort()


@probe(dtype=(u8, torch.bool, f16, f64), rows=(3, 200))
def _sort_dtypes(device: str, dtype: torch.dtype, rows: int) -> Step:
    tensor = _values(device, rows, 10_007, dtype=dtype)
    return lambda: tensor.sort(descending=True)


@probe(columns=(4096, 999_999, 1_000_000))
def _sort_long_rows(device: str, columns: int) -> Step:
    tensor = _values(device, 3, columns, dtype=i32)
    return lambda: tensor.sort()


@probe(layout=("transposed", "strided", "permuted", "expanded"))
def _sort_layouts(device: str, layout: str) -> Step:
    tensors = {
        "transposed": lambda: _values(device, 6000, 300).t(),
        "strided": lambda: _strided(device, 300, 6000),
        "permuted": lambda: _values(device, 5, 6000, 7).permute(2, 0, 1),
        "expanded": lambda: _values(device, 1, 6000).expand(9, 6000),
    }
    tensor = tensors[layout]()
    return lambda: tensor.sort(dim=-1, stable=True)


@probe(shape=((5000, 64), (4096, 64), (70, 5000, 3)))
def _sort_first_or_middle_axis(device: str, shape: tuple[int, ...]) -> Step:
    tensor = _values(device, *shape)
    return lambda: tensor.sort(dim=len(shape) - 2)


# ---------------------------------------------------------------- the k largest
@probe(shape=((1, 19_999), (1, 20_000), (20, 20_000), (21, 9_999), (21, 10_000), (81, 5_000), (200, 3_001), (801, 800)))
def _topk(device: str, shape: tuple[int, int]) -> Step:
    tensor = _values(device, *shape)
    return lambda: tensor.topk(50)


@probe(rows=(4000, 4001), columns=(399, 1000))
def _topk_many_rows(device: str, rows: int, columns: int) -> Step:
    tensor = _values(device, rows, columns, dtype=f64)
    return lambda: tensor.topk(7, largest=False)


@probe(k=(4096, 4097, 30_000), dim=(0, 1))
def _topk_of_many(device: str, k: int, dim: int) -> Step:
    tensor = _values(device, 4, 100_003) if dim else _values(device, 100_003, 4)
    return lambda: tensor.topk(k, dim=dim)


@probe(rows=(1, 3))
def _topk_of_strided_rows(device: str, rows: int) -> Step:
    tensor = _strided(device, rows, 5_000_011, dtype=u8)
    return lambda: tensor.topk(5000, sorted=False)


# ---------------------------------------------------------------- by rank, by search
@probe(operator=("median", "nanmedian"), size=(1, 4096, 1_000_003))
def _median(device: str, operator: str, size: int) -> Step:
    tensor = _values(device, size, dtype=bf16)
    return lambda: getattr(tensor, operator)()


@probe(operator=("median", "nanmedian", "kthvalue", "mode"))
def _by_rank(device: str, operator: str) -> Step:
    tensor = _values(device, 301, 2000).t()
    chosen: tuple[Any, ...] = (5, 1) if operator == "kthvalue" else (1,)
    return lambda: getattr(tensor, operator)(*chosen)


@probe(dim=(0, 1))
def _median_of_a_strided_matrix(device: str, dim: int) -> Step:
    tensor = _values(device, 700, 900)
    return lambda: (tensor.t().median(), tensor.mode(dim))


@probe(dtypes=((f32, f32), (i32, i64)), layout=("contiguous", "strided"))
def _searchsorted(device: str, dtypes: tuple[torch.dtype, torch.dtype], layout: str) -> Step:
    boundaries = _values(device, 1000, dtype=dtypes[0]).sort().values
    values = _values(device, 300, 77, dtype=dtypes[1])
    values = values if layout == "contiguous" else values.t()
    return lambda: (torch.searchsorted(boundaries, values), torch.bucketize(values, boundaries))


# ---------------------------------------------------------------- permutations and samples
@probe(n=(100, 5000, 2_000_003), dtype=(i64, i32))
def _randperm(device: str, n: int, dtype: torch.dtype) -> Step:
    return lambda: torch.randperm(n, device=device, dtype=dtype)


@probe(rows=(1, 100), samples=(1, 5), replacement=(True, False))
def _multinomial(device: str, rows: int, samples: int, replacement: bool) -> Step:
    weights = torch.rand(rows, 50_257, device=device)
    return lambda: torch.multinomial(weights, samples, replacement=replacement)


# ---------------------------------------------------------------- scans
@probe(size=(5000, 1_000_003), dtype=(f32, bf16, i32))
def _cumulate_a_vector(device: str, size: int, dtype: torch.dtype) -> Step:
    tensor = _values(device, size, dtype=dtype)
    return lambda: (tensor.cumsum(0), tensor.cumprod(0))


@probe(dim=(0, 1), layout=("contiguous", "transposed", "strided"))
def _cumulate_rows(device: str, dim: int, layout: str) -> Step:
    tensor = {
        "contiguous": lambda: _values(device, 300, 1000, dtype=i32),
        "transposed": lambda: _values(device, 1000, 300, dtype=i32).t(),
        "strided": lambda: _strided(device, 300, 1000, dtype=i32),
    }[layout]()
    return lambda: (tensor.cumsum(dim), tensor.cumprod(dim), tensor.cummax(dim), tensor.cummin(dim))


@probe(shape=((100_003,), (1, 100_003), (300, 1000)))
def _logcumsumexp(device: str, shape: tuple[int, ...]) -> Step:
    tensor = _values(device, *shape, dtype=bf16)
    return lambda: tensor.logcumsumexp(-1)


@probe(layout=("contiguous", "transposed"))
def _cumulate_in_place(device: str, layout: str) -> Step:
    tensor = _values(device, 300, 1000) if layout == "contiguous" else _values(device, 1000, 300).t()
    return lambda: tensor.cumsum_(1)
