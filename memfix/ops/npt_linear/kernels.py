"""The Triton kernels of the low-rank products. Each reads or writes one wide tensor, once."""

# N tokens, C columns of the wide tensor, R rank; arguments in upper case are constexpr: block sizes and flags

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels import product


@triton.jit
def narrow_product(
    wide, row_stride, column_stride, narrow, narrow_row_stride, narrow_column_stride,
    modulation, modulation_row_stride, modulation_column_stride, down, scaled, grad_down, grad_modulation,
    num_tokens, width, rank,
    IS_BACKWARD: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """Compute ``wide @ narrow`` in float32, and the elementwise products with it.

    In forward the product is stored as ``down``, and ``scaled = down * modulation``. In backward the wide tensor is the
    gradient of the result: ``grad_down = product * modulation``, ``grad_modulation = product * down``, and ``scaled``
    is recomputed from ``down``.
    """
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ranks = tl.arange(0, RANK)
    is_token = (tokens < num_tokens)[:, None]
    belongs = is_token & (ranks < rank)[None, :]
    at_modulation = modulation + tokens[:, None] * modulation_row_stride + ranks[None, :] * modulation_column_stride
    modulation_NR = tl.load(at_modulation, mask=belongs, other=0.0).to(tl.float32)
    sums_NR = tl.zeros((TOKENS, RANK), tl.float32)
    for first in range(0, width, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = columns < width
        at_wide = wide + tokens[:, None] * row_stride + columns[None, :] * column_stride
        at_narrow = narrow + columns[:, None] * narrow_row_stride + ranks[None, :] * narrow_column_stride
        wide_NC = tl.load(at_wide, mask=is_token & inside[None, :], other=0.0)
        narrow_CR = tl.load(at_narrow, mask=inside[:, None] & (ranks < rank)[None, :], other=0.0)
        sums_NR += product(wide_NC, narrow_CR)
    at = tokens[:, None] * rank + ranks[None, :]
    down_NR = sums_NR
    if IS_BACKWARD:
        down_NR = tl.load(down + at, mask=belongs, other=0.0)
        tl.store(grad_down + at, (sums_NR * modulation_NR).to(grad_down.dtype.element_ty), mask=belongs)
        tl.store(grad_modulation + at, (sums_NR * down_NR).to(grad_modulation.dtype.element_ty), mask=belongs)
    else:
        tl.store(down + at, down_NR, mask=belongs)
    tl.store(scaled + at, (down_NR * modulation_NR).to(scaled.dtype.element_ty), mask=belongs)


@triton.jit
def wide_product(
    scaled, narrow, narrow_row_stride, narrow_column_stride, out, num_tokens, width, rank, tokens_per_program,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr, RANK: tl.constexpr,
):  # fmt: skip
    """``out = scaled @ narrow``. A program loads its columns of ``narrow`` once and loops over blocks of tokens."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    ranks = tl.arange(0, RANK)
    inside = (columns < width)[None, :]
    at_narrow = narrow + ranks[:, None] * narrow_row_stride + columns[None, :] * narrow_column_stride
    narrow_RC = tl.load(at_narrow, mask=(ranks < rank)[:, None] & inside, other=0.0)
    first = tl.program_id(1) * tokens_per_program
    for start in range(first, min(first + tokens_per_program, num_tokens), TOKENS):
        tokens = start + tl.arange(0, TOKENS).to(tl.int64)
        is_token = (tokens < num_tokens)[:, None]
        at_scaled = scaled + tokens[:, None] * rank + ranks[None, :]
        scaled_NR = tl.load(at_scaled, mask=is_token & (ranks < rank)[None, :], other=0.0)
        result_NC = product(scaled_NR, narrow_RC).to(out.dtype.element_ty)
        tl.store(out + tokens[:, None] * width + columns[None, :], result_NC, mask=is_token & inside)
