"""The Triton kernel of rope: it reads every pair of elements once, rotates it in registers, and writes it once."""

# N tokens of all sequences, T positions of a sequence, H heads, P pairs (half of the width D of a head)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x, x_stride_b, x_stride_t, x_stride_h, x_stride_d, out, out_stride_b, out_stride_t, out_stride_h, out_stride_d,
    table, positions, positions_stride_b, positions_stride_t, num_tokens, length, num_heads,
    NUM_PAIRS: tl.constexpr, HAS_POSITIONS: tl.constexpr, INVERSE: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """Write each pair as (first*cos - second*sin, second*cos + first*sin), or with ``INVERSE`` rotate it back.

    A program takes ``TOKENS`` tokens and ``HEADS`` of their heads, which share the rows of the table. It computes in
    the table's dtype and rounds once. ``NUM_PAIRS`` is a constexpr, so that loads are vectorized for any width.
    """
    tokens = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, PAIRS)
    # divide in 32 bits, which is fast; compute addresses in 64
    sequence = (tokens // length).to(tl.int64)
    place = (tokens % length).to(tl.int64)
    counts = tokens < num_tokens
    if HAS_POSITIONS:
        at_position = positions + sequence * positions_stride_b + place * positions_stride_t
        row = tl.load(at_position, mask=counts, other=0).to(tl.int64)
    else:
        row = place
    at_cos = table + row[:, None] * (2 * NUM_PAIRS) + pairs[None, :]
    has_row = counts[:, None] & (pairs < NUM_PAIRS)[None, :]
    cos = tl.load(at_cos, mask=has_row, other=0.0)[:, None, :]
    sin = tl.load(at_cos + NUM_PAIRS, mask=has_row, other=0.0)[:, None, :]
    if INVERSE:
        sin = -sin
    inside = (counts[:, None, None] & (heads < num_heads)[None, :, None]) & (pairs < NUM_PAIRS)[None, None, :]
    at_head = (sequence * x_stride_b + place * x_stride_t)[:, None] + heads[None, :] * x_stride_h
    at_first = x + at_head[:, :, None] + pairs[None, None, :] * x_stride_d
    first = tl.load(at_first, mask=inside, other=0.0).to(table.dtype.element_ty)
    second = tl.load(at_first + NUM_PAIRS * x_stride_d, mask=inside, other=0.0).to(table.dtype.element_ty)
    to_head = (sequence * out_stride_b + place * out_stride_t)[:, None] + heads[None, :] * out_stride_h
    to_first = out + to_head[:, :, None] + pairs[None, None, :] * out_stride_d
    tl.store(to_first, (first * cos - second * sin).to(out.dtype.element_ty), mask=inside)
    to_second = to_first + NUM_PAIRS * out_stride_d
    tl.store(to_second, (second * cos + first * sin).to(out.dtype.element_ty), mask=inside)
