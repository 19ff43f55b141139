"""Matrix products in every layout of their operands, plain and batched, with and without a bias."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F

from .registry import Step, bf16, c64, f32, f64, leaf, probe

_LAYOUTS = ("rows", "columns", "slice", "gapped", "repeated_row", "repeated")


def _laid_out(device: str, shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> torch.Tensor:
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


def _pair(
    device: str, dtype: torch.dtype, left: str = "rows", right: str = "rows", batch: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """The left and the right matrix of a product, in the given layouts."""
    return _laid_out(device, (*batch, 1000, 520), dtype, left), _laid_out(device, (*batch, 520, 264), dtype, right)


probe("mm", left=_LAYOUTS, right=("rows", "gapped"))(
    lambda device, left, right: partial(torch.mm, *_pair(device, bf16, left, right))
)
probe("mm_in", dtype=(f32, f64, c64), layout=("rows", "gapped"))(
    lambda device, dtype, layout: partial(torch.mm, *_pair(device, dtype, layout, "columns"))
)


@probe(shape=((64, 520, 264), (3, 1, 264)), layout=("rows", "columns", "gapped", "repeated"))
def _bmm(device: str, shape: tuple[int, int, int], layout: str, columns: int = 40) -> Step:
    batch, _, inner = shape
    return partial(
        torch.bmm, _laid_out(device, shape, bf16, layout), _laid_out(device, (batch, inner, columns), bf16, "rows")
    )


probe("bmm_to_one_column", layout=("rows", "columns", "gapped"))(
    lambda device, layout: _bmm(device, (8, 520, 264), layout, columns=1)
)


@probe(dtype=(bf16, f32), bias=("vector", "matrix", "gapped"))
def _addmm(device: str, dtype: torch.dtype, bias: str) -> Step:
    a, b = _pair(device, dtype, right="columns")
    shape = (264,) if bias == "vector" else (1000, 264)
    added = _laid_out(device, (1, *shape), dtype, "gapped" if bias == "gapped" else "rows")[0]
    return partial(torch.addmm, added, a, b)


probe("addmm_in_place", layout=("rows", "columns", "slice", "gapped"))(
    lambda device, layout: partial(_laid_out(device, (1000, 264), f32, layout).addmm_, *_pair(device, f32))
)
probe("baddbmm_in_place", layout=("rows", "columns", "gapped"))(
    lambda device, layout: partial(
        _laid_out(device, (4, 1000, 264), f32, layout).baddbmm_, *_pair(device, f32, batch=(4,))
    )
)
probe("addbmm", layout=("rows", "gapped"))(
    lambda device, layout: partial(
        torch.addbmm, _laid_out(device, (1000, 264), f32, "rows"), *_pair(device, f32, layout, batch=(4,))
    )
)
probe("mv", layout=("rows", "columns", "gapped", "repeated"))(
    lambda device, layout: partial(_laid_out(device, (1000, 520), f32, layout).mv, torch.rand(520, device=device))
)
probe("mv_of_a_repeated_vector")(
    lambda device: partial(
        torch.mv, _laid_out(device, (1000, 520), f32, "rows"), torch.rand(1, device=device).expand(520)
    )
)


@probe(conjugated=("rows", "columns", "slice"))
def _mm_of_a_conjugate(device: str, conjugated: str) -> Step:
    a, b = _laid_out(device, (1000, 520), c64, conjugated).conj(), _laid_out(device, (520, 264), c64, "rows")
    return partial(torch.mm, a, b)


@probe(layout=("columns", "rows"))
def _int_mm(device: str, layout: str) -> Step:
    a = torch.ones(1000, 128, dtype=torch.int8, device=device)
    b = torch.ones(128, 64, dtype=torch.int8, device=device)
    b = b.t().contiguous().t() if layout == "columns" else b
    return partial(torch._int_mm, a, b)


@probe()
def _dot_and_outer(device: str) -> Step:
    v, w = torch.rand(4000, device=device)[::2], torch.rand(2000, device=device)
    return lambda: (torch.dot(v, w), torch.outer(v, w), torch.addr(torch.ones(1, device=device), v, w))


@probe(dtype=(bf16, f32))
def _linear_and_its_backward(device: str, dtype: torch.dtype) -> Step:
    x, weight, bias = (leaf(device, *s, dtype=dtype, draw=torch.rand) for s in ((8, 500, 520), (264, 520), (264,)))
    return lambda: F.linear(x, weight, bias).sum().backward()
