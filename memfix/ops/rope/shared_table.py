"""Rotates by rows of one shared table, straight into the output; backward rotates the gradient the other way."""

# ... leading dims, T positions, H heads, D width of a head, P pairs (half of D)

from __future__ import annotations

import math
from typing import Any

import torch

from ..arguments import require_at_least_one
from ..derivatives import apply
from .arguments import num_positions_of, require_positions, require_rope
from .tables import RopeTables, default_tables

SCRATCH_BYTES = 16 << 20  # small enough for a GPU's L2 cache, large enough to keep the GPU busy


def shared_table_rope(
    x: torch.Tensor,
    *,
    base: float = 10_000.0,
    offset: int = 0,
    positions: torch.Tensor | None = None,
    max_positions: int | None = None,
    positions_per_chunk: int | None = None,
    tables: RopeTables | None = None,
) -> torch.Tensor:
    """Equals ``x * cos + rotate_half(x) * sin``, ``cos`` and ``sin`` of ``position * base**(-2i/D)``.

    16-bit ``x`` is rotated in float32, ``positions_per_chunk`` positions at a time, and rounded once. Nothing of the
    size of ``x`` is held for backward: the gradient needs only the table's rows.

    Peak above inputs, ``x`` of ``[B, T, H, D]`` and ``e`` its item size: ``B*T*H*D*e`` forward, twice that in train;
    and for 16-bit ``x`` half of one chunk in float32, ``B*positions_per_chunk*H*D/2*4``.
    With ``positions``, their table rows are gathered, ``B*T*D`` of at least 4 bytes, and held for backward.
    """
    require_rope(x, base, offset)
    if positions_per_chunk is not None:
        require_at_least_one("positions_per_chunk", positions_per_chunk)
    tables = default_tables() if tables is None else tables
    if positions is None:
        last = offset + x.shape[-3]
        rows = tables.rows(x, base=base, num_positions=max(last, max_positions or 0))[offset:last]
    else:
        require_positions(positions, x, offset)
        rows = tables.rows(x, base=base, num_positions=num_positions_of(positions, max_positions))[positions]
    return apply(_Rotation, x, rows.unsqueeze(-2), 1, positions_per_chunk or _positions_that_fit(x))


def _positions_that_fit(x: torch.Tensor) -> int:
    bytes_per_position = 4 * math.prod(x.shape[:-3]) * x.shape[-2] * (x.shape[-1] // 2)
    return max(1, SCRATCH_BYTES // max(1, bytes_per_position))


class _Rotation(torch.autograd.Function):
    """A rotation. It is linear in ``x``, so its gradient is the rotation back, which can be differentiated again."""

    @staticmethod
    def forward(x: torch.Tensor, rows_T1D: torch.Tensor, direction: int, positions_per_chunk: int) -> torch.Tensor:
        return _rotated(x, rows_T1D, direction, positions_per_chunk)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, rows_T1D, ctx.direction, ctx.positions_per_chunk = inputs
        ctx.save_for_backward(rows_T1D)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (rows_T1D,) = ctx.saved_tensors
        return apply(_Rotation, grad, rows_T1D, -ctx.direction, ctx.positions_per_chunk), None, None, None


def _rotated(x: torch.Tensor, rows_T1D: torch.Tensor, direction: int, positions_per_chunk: int) -> torch.Tensor:
    """Return each pair as (first*cos - second*sin, second*cos + first*sin), with ``sin`` times ``direction``."""
    out = torch.empty_like(x)
    cos, sin = rows_T1D.chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    if x.dtype == rows_T1D.dtype:
        _write(out_first, first, second, cos, sin, -direction)
        _write(out_second, second, first, cos, sin, direction)
        return out
    # multiply and add in the table's precision; in the output's each would round
    longest = min(positions_per_chunk, x.shape[-3])
    scratch = x.new_empty((*x.shape[:-3], longest, *first.shape[-2:]), dtype=cos.dtype)
    whole = (out_first, out_second, first, second, cos, sin)
    for chunk in zip(*(tensor.split(positions_per_chunk, dim=-3) for tensor in whole), strict=True):
        out_first_C, out_second_C, first_C, second_C, cos_C, sin_C = chunk
        part = scratch.narrow(-3, 0, first_C.shape[-3])
        _write(part, first_C, second_C, cos_C, sin_C, -direction)
        out_first_C.copy_(part)
        _write(part, second_C, first_C, cos_C, sin_C, direction)
        out_second_C.copy_(part)
    return out


def _write(
    target: torch.Tensor, along: torch.Tensor, across: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, sign: int
) -> None:
    """Write ``target = along*cos + sign*across*sin``."""
    torch.mul(along, cos, out=target)
    target.addcmul_(across, sin, value=sign)
