"""The ``torch.nn.Module`` of rope, which a layer holds instead of a table of its own."""

from __future__ import annotations

import torch

from .arguments import require_base, require_position
from .tables import RopeTables, default_tables


class RotaryEmbedding(torch.nn.Module):
    """Rotary position embedding of ``x`` of ``[..., T, H, dim]``, the first half of ``dim`` paired with the second.

    The module has no buffers: checkpoints save nothing, ``.to()`` and ``copy.deepcopy`` have nothing to move, cast or
    duplicate, and all layers of a device share one float32 table in ``tables``. ``max_positions`` makes that table long
    enough at the first call, and promises that ``positions`` are below it; a longer sequence still grows the table.
    """

    def __init__(
        self,
        dim: int,
        *,
        base: float = 10_000.0,
        max_positions: int | None = None,
        tables: RopeTables | None = None,
    ) -> None:
        super().__init__()
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(f"dim must be an int, got {dim!r}")
        if dim < 2 or dim % 2:
            raise ValueError(f"dim must be even and at least 2, got {dim}")
        self.dim = dim
        self.base = require_base(base)
        self.max_positions = None if max_positions is None else require_position("max_positions", max_positions)
        self.tables = default_tables() if tables is None else tables

    def forward(self, x: torch.Tensor, *, offset: int = 0, positions: torch.Tensor | None = None) -> torch.Tensor:
        if x.shape[-1] != self.dim:
            raise ValueError(f"x must be [..., T, H, {self.dim}], got shape {list(x.shape)}")
        from . import rope

        return rope(
            x,
            base=self.base,
            offset=offset,
            positions=positions,
            max_positions=self.max_positions,
            tables=self.tables,
        )

    def extra_repr(self) -> str:
        reserved = "" if self.max_positions is None else f", max_positions={self.max_positions}"
        return f"{self.dim}, base={self.base:g}{reserved}"
