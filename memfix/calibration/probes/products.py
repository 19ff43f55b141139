"""Products: every layout of a matrix, plain and batched, with and without a bias."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...meters.base import Step
from .registry import probe

bf16, f32, f64, c64 = torch.bfloat16, torch.float32, torch.float64, torch.complex64
_LAYOUTS = ("rows", "columns", "slice", "gapped", "repeated_row", "repeated")


def _matrix(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
    *batch, rows, columns = shape
    if layout == "columns":
        return torch.rand(*batch, columns, rows, dtype=dtype, device=device).mT
    if layout == "slice":
        return torch.rand(*batch, rows, columns + 24, dtype=dtype, device=device)[..., 8 : columns + 8]
    if layout == "gapped":
        return torch.rand(*batch, rows, 2 * columns, dtype=dtype, device=device)[..., ::2]
    if layout == "repeated_row":
        return torch.rand(columns, dtype=dtype, device=device).expand(shape)
    if layout == "repeated":
        return torch.rand(1, dtype=dtype, device=device).expand(shape)
    return torch.rand(shape, dtype=dtype, device=device)


@probe(left=_LAYOUTS, right=("rows", "gapped"))
def _mm(device: str, left: str, right: str) -> Step:
    a, b = _matrix(device, (1000, 520), bf16, left), _matrix(device, (520, 264), bf16, right)
    return lambda: a @ b


@probe(dtype=(f32, f64, c64), layout=("rows", "gapped"))
def _mm_in(device: str, dtype: torch.dtype, layout: str) -> Step:
    a, b = _matrix(device, (1000, 520), dtype, layout), _matrix(device, (520, 264), dtype, "columns")
    return lambda: a @ b


@probe(shape=((64, 520, 264), (3, 1, 264)), layout=("rows", "columns", "gapped", "repeated"))
def _bmm(device: str, shape: tuple[int, int, int], layout: str) -> Step:
    batch, rows, inner = shape
    a = _matrix(device, (batch, rows, inner), bf16, layout)
    b = _matrix(device, (batch, inner, 40), bf16, "rows")
    return lambda: torch.bmm(a, b)


@probe(layout=("rows", "columns", "gapped"))
def _bmm_to_one_column(device: str, layout: str) -> Step:
    a, b = _matrix(device, (8, 520, 264), bf16, layout), _matrix(device, (8, 264, 1), bf16, "rows")
    return lambda: torch.bmm(a, b)


@probe(dtype=(bf16, f32), bias=("vector", "matrix", "gapped"))
def _addmm(device: str, dtype: torch.dtype, bias: str) -> Step:
    a, b = _matrix(device, (1000, 520), dtype, "rows"), _matrix(device, (520, 264), dtype, "columns")
    shape = (264,) if bias == "vector" else (1000, 264)
    added = _matrix(device, (1, *shape), dtype, "gapped" if bias == "gapped" else "rows")[0]
    return lambda: torch.addmm(added, a, b)


@probe(layout=("rows", "columns", "slice", "gapped"))
def _addmm_in_place(device: str, layout: str) -> Step:
    a, b = _matrix(device, (1000, 520), f32, "rows"), _matrix(device, (520, 264), f32, "rows")
    result = _matrix(device, (1000, 264), f32, layout)
    return lambda: result.addmm_(a, b)


@probe(layout=("rows", "columns", "gapped"))
def _baddbmm_in_place(device: str, layout: str) -> Step:
    a, b = _matrix(device, (4, 1000, 520), f32, "rows"), _matrix(device, (4, 520, 264), f32, "rows")
    result = _matrix(device, (4, 1000, 264), f32, layout)
    return lambda: result.baddbmm_(a, b)


@probe(layout=("rows", "gapped"))
def _addbmm(device: str, layout: str) -> Step:
    a, b = _matrix(device, (4, 1000, 520), f32, layout), _matrix(device, (4, 520, 264), f32, "rows")
    bias = _matrix(device, (1000, 264), f32, "rows")
    return lambda: torch.addbmm(bias, a, b)


@probe(layout=("rows", "columns", "gapped", "repeated"))
def _mv(device: str, layout: str) -> Step:
    a, v = _matrix(device, (1000, 520), f32, layout), torch.rand(520, device=device)
    return lambda: a @ v


@probe()
def _mv_of_a_repeated_vector(device: str) -> Step:
    a, v = _matrix(device, (1000, 520), f32, "rows"), torch.rand(1, device=device).expand(520)
    return lambda: a @ v


@probe(conjugated=("rows", "columns", "slice"))
def _mm_of_a_conjugate(device: str, conjugated: str) -> Step:
    a, b = _matrix(device, (1000, 520), c64, conjugated).conj(), _matrix(device, (520, 264), c64, "rows")
    return lambda: a @ b


@probe(layout=("columns", "rows"))
def _int_mm(device: str, layout: str) -> Step:
    a = torch.ones(1000, 128, dtype=torch.int8, device=device)
    b = torch.ones(128, 64, dtype=torch.int8, device=device)
    b = b.t().contiguous().t() if layout == "columns" else b
    return lambda: torch._int_mm(a, b)


@probe()
def _dot_and_outer(device: str) -> Step:
    v, w = torch.rand(4000, device=device)[::2], torch.rand(2000, device=device)
    return lambda: (torch.dot(v, w), torch.outer(v, w), torch.addr(torch.ones(1, device=device), v, w))


@probe(dtype=(bf16, f32))
def _linear_and_its_backward(device: str, dtype: torch.dtype) -> Step:
    x = torch.rand(8, 500, 520, dtype=dtype, device=device, requires_grad=True)
    weight = torch.rand(264, 520, dtype=dtype, device=device, requires_grad=True)
    bias = torch.rand(264, dtype=dtype, device=device, requires_grad=True)
    return lambda: F.linear(x, weight, bias).sum().backward()
