"""Rotates by one kernel that reads and writes every element once; backward rotates the gradient back with it.

The kernel reads the table's rows in place, at ``positions`` too: nothing is gathered, and there is no scratch.
"""

# B sequences, T positions, H heads, D width of a head, P pairs (half of D)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..derivatives import apply
from ..dispatch import require_kernels
from ..launches import launch, next_power_of_two, num_tiles
from .arguments import num_positions_of, require_positions, require_rope
from .tables import RopeTables, default_tables


@dataclass(frozen=True)
class Tiles:
    """The tile size and the warps of the kernel."""

    pairs: int = 2048
    """Pairs per program: those of a token's heads, and of more tokens where one token has fewer."""
    num_warps: int = 4


TILES = Tiles()


def triton_rope(
    x: torch.Tensor,
    *,
    base: float = 10_000.0,
    offset: int = 0,
    positions: torch.Tensor | None = None,
    max_positions: int | None = None,
    tables: RopeTables | None = None,
) -> torch.Tensor:
    """Equals ``x * cos + rotate_half(x) * sin``, ``cos`` and ``sin`` of ``position * base**(-2i/D)``.

    Peak above inputs, ``x`` of ``[B, T, H, D]`` and ``e`` its item size: ``B*T*H*D*e`` forward, twice that in train.
    Only the table that all calls share and ``positions`` are held for backward. ``x`` is copied where its leading dims
    cannot be viewed as one.
    """
    require_rope(x, base, offset)
    if positions is not None:
        require_positions(positions, x, offset)
    needed = offset + x.shape[-3] if positions is None else num_positions_of(positions, max_positions)
    require_kernels(x, instead="shared_table")
    tables = default_tables() if tables is None else tables
    table = tables.rows(x, base=base, num_positions=max(needed, max_positions or 0))
    positions_BT = None if positions is None else positions.expand(x.shape[:-2]).reshape(-1, x.shape[-3])
    # slice the table: an offset among the kernel's arguments would miss the launch cache at every step of a decoder
    return apply(_Rotation, x, table[offset:], positions_BT, False)


class _Rotation(torch.autograd.Function):
    """A rotation. It is linear in ``x``, so its gradient is the rotation back, which can be differentiated again."""

    @staticmethod
    def forward(
        x: torch.Tensor, table: torch.Tensor, positions_BT: torch.Tensor | None, is_inverse: bool
    ) -> torch.Tensor:
        return _rotated(x, table, positions_BT, is_inverse)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, table, positions_BT, ctx.is_inverse = inputs
        ctx.save_for_backward(table, positions_BT)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        table, positions_BT = ctx.saved_tensors
        return apply(_Rotation, grad, table, positions_BT, not ctx.is_inverse), None, None, None


def _rotated(x: torch.Tensor, table: torch.Tensor, positions_BT: torch.Tensor | None, is_inverse: bool) -> torch.Tensor:
    from .kernels import rotate

    if not x.numel():
        return torch.empty_like(x)
    x_BTHD = x if x.dim() == 4 else x.reshape(-1, *x.shape[-3:])
    out_BTHD = torch.empty_like(x_BTHD)
    num_sequences, length, num_heads, width = x_BTHD.shape
    pairs = next_power_of_two(width // 2)
    heads = min(next_power_of_two(num_heads), max(1, TILES.pairs // pairs))
    tokens = max(1, TILES.pairs // (pairs * heads))
    num_tokens = num_sequences * length
    strides = (0, 0) if positions_BT is None else positions_BT.stride()
    launch(
        rotate, (num_tiles(num_tokens, tokens), num_tiles(num_heads, heads)),
        x_BTHD, *x_BTHD.stride(), out_BTHD, *out_BTHD.stride(), table, positions_BT, *strides,
        num_tokens, length, num_heads,
        NUM_PAIRS=width // 2, HAS_POSITIONS=positions_BT is not None, INVERSE=is_inverse,
        TOKENS=tokens, HEADS=heads, PAIRS=pairs, num_warps=TILES.num_warps, num_stages=1,
    )  # fmt: skip
    return out_BTHD if x.dim() == 4 else out_BTHD.view(x.shape)
