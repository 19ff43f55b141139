"""The Triton kernel of a product: one program per tile, whose sizes are constexprs."""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import product


@triton.jit
def product_tile(
    left, right, out, rows, columns, terms, left_row, left_column, right_row, right_column,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TERMS: tl.constexpr,
):  # fmt: skip
    """Write ``out = left @ right``. The operands have any strides, and ``out`` is contiguous."""
    at_row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at_column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, terms, TERMS):
        at_term = first + tl.arange(0, TERMS)
        left_tile = tl.load(
            left + at_row[:, None] * left_row + at_term[None, :] * left_column,
            mask=(at_row < rows)[:, None] & (at_term < terms)[None, :],
            other=0.0,
        )
        right_tile = tl.load(
            right + at_term[:, None] * right_row + at_column[None, :] * right_column,
            mask=(at_term < terms)[:, None] & (at_column < columns)[None, :],
            other=0.0,
        )
        sums += product(left_tile, right_tile)
    inside = (at_row < rows)[:, None] & (at_column < columns)[None, :]
    tl.store(out + at_row[:, None] * columns + at_column[None, :], sums, mask=inside)
