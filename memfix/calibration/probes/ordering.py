"""Sorting, selecting, searching, permuting, sampling and scanning, on both sides of every threshold in the rules."""

from __future__ import annotations

from functools import partial

import torch

from .registry import Step, bf16, f16, f32, f64, i32, i64, probe, u8


def _values(device: str, *shape: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """Random values of ``dtype``, so that neighbours are rarely equal."""
    if dtype.is_floating_point:
        return torch.rand(shape, dtype=dtype, device=device)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, device=device).to(dtype)


def _random_matrix(device: str, layout: str, rows: int, columns: int, dtype: torch.dtype = f32) -> torch.Tensor:
    """A matrix of random values. The layout ``strided`` has a gap after every element."""
    if layout == "strided":
        return _values(device, rows, 2 * columns, dtype=dtype)[:, ::2]
    if layout == "transposed":
        return _values(device, columns, rows, dtype=dtype).t()
    return _values(device, rows, columns, dtype=dtype)


# ---------------------------------------------------------------- sorting
probe("sort", rows=(1, 2, 127, 128), columns=(4097,), dtype=(f32, i64))(
    lambda device, rows, columns, dtype: _values(device, rows, columns, dtype=dtype).sort
)
probe("sort_dtypes", dtype=(u8, torch.bool, f16, f64), rows=(3, 200))(
    lambda device, dtype, rows: partial(_values(device, rows, 10_007, dtype=dtype).sort, descending=True)
)
probe("sort_long_rows", columns=(4096, 999_999, 1_000_000))(
    lambda device, columns: _values(device, 3, columns, dtype=i32).sort
)


@probe(layout=("transposed", "strided", "permuted", "expanded"))
def _sort_layouts(device: str, layout: str) -> Step:
    if layout == "permuted":
        tensor = _values(device, 5, 6000, 7).permute(2, 0, 1)
    elif layout == "expanded":
        tensor = _values(device, 1, 6000).expand(9, 6000)
    else:
        tensor = _random_matrix(device, layout, 300, 6000)
    return partial(tensor.sort, dim=-1, stable=True)


probe("sort_first_or_middle_axis", shape=((5000, 64), (4096, 64), (70, 5000, 3)))(
    lambda device, shape: partial(_values(device, *shape).sort, dim=len(shape) - 2)
)


# ---------------------------------------------------------------- the k largest
_SHAPES = ((1, 19_999), (1, 20_000), (20, 20_000), (21, 9_999), (21, 10_000), (81, 5_000), (200, 3_001), (801, 800))
probe("topk", shape=_SHAPES)(lambda device, shape: partial(_values(device, *shape).topk, 50))
probe("topk_many_rows", rows=(4000, 4001), columns=(399, 1000))(
    lambda device, rows, columns: partial(_values(device, rows, columns, dtype=f64).topk, 7, largest=False)
)
probe("topk_of_many", k=(4096, 4097, 30_000), dim=(0, 1))(
    lambda device, k, dim: partial(_values(device, *((4, 100_003) if dim else (100_003, 4))).topk, k, dim=dim)
)
probe("topk_of_strided_rows", rows=(1, 3))(
    lambda device, rows: partial(_random_matrix(device, "strided", rows, 5_000_011, u8).topk, 5000, sorted=False)
)


# ---------------------------------------------------------------- by rank, by search
probe("median", operator=("median", "nanmedian"), size=(1, 4096, 1_000_003))(
    lambda device, operator, size: getattr(_values(device, size, dtype=bf16), operator)
)
probe("by_rank", operator=("median", "nanmedian", "kthvalue", "mode"))(
    lambda device, operator: partial(
        getattr(_values(device, 301, 2000).t(), operator), *((5, 1) if operator == "kthvalue" else (1,))
    )
)
probe("median_of_a_strided_matrix", dim=(0, 1))(
    lambda device, dim: partial(lambda x: (x.t().median(), x.mode(dim)), _values(device, 700, 900))
)


@probe(dtypes=((f32, f32), (i32, i64)), layout=("contiguous", "strided"))
def _searchsorted(device: str, dtypes: tuple[torch.dtype, torch.dtype], layout: str) -> Step:
    boundaries = _values(device, 1000, dtype=dtypes[0]).sort().values
    values = _values(device, 300, 77, dtype=dtypes[1])
    values = values if layout == "contiguous" else values.t()
    return lambda: (torch.searchsorted(boundaries, values), torch.bucketize(values, boundaries))


probe("isin", shape=((4,), (300, 77), (2, 500_009)), num_tests=(1, 3, 9))(
    lambda device, shape, num_tests: partial(
        torch.isin, torch.randint(0, 50, shape, device=device), torch.arange(num_tests, device=device)
    )
)
probe("histc", size=(4096, 1_000_003), bins=(8, 128, 100_003))(
    lambda device, size, bins: partial(torch.histc, torch.rand(size, device=device), bins=bins, min=0, max=1)
)


# ---------------------------------------------------------------- permutations and samples
probe("randperm", n=(100, 5000, 2_000_003), dtype=(i64, i32))(
    lambda device, n, dtype: partial(torch.randperm, n, device=device, dtype=dtype)
)
probe("multinomial", rows=(1, 100), samples=(1, 5), replacement=(True, False))(
    lambda device, rows, samples, replacement: partial(
        torch.multinomial, torch.rand(rows, 50_257, device=device), samples, replacement=replacement
    )
)


# ---------------------------------------------------------------- scans
probe("cumulate_a_vector", size=(5000, 1_000_003), dtype=(f32, bf16, i32))(
    lambda device, size, dtype: partial(lambda x: (x.cumsum(0), x.cumprod(0)), _values(device, size, dtype=dtype))
)
probe("cumulate_rows", dim=(0, 1), layout=("contiguous", "transposed", "strided"))(
    lambda device, dim, layout: partial(
        lambda x: (x.cumsum(dim), x.cumprod(dim), x.cummax(dim), x.cummin(dim)),
        _random_matrix(device, layout, 300, 1000, i32),
    )
)
probe("logcumsumexp", shape=((100_003,), (1, 100_003), (300, 1000)))(
    lambda device, shape: partial(_values(device, *shape, dtype=bf16).logcumsumexp, -1)
)
probe("cumulate_in_place", layout=("contiguous", "transposed"))(
    lambda device, layout: partial(_random_matrix(device, layout, 300, 1000).cumsum_, 1)
)
