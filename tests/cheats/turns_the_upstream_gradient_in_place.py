"""Rotates the upstream gradient in place, in memory that autograd owns."""

from __future__ import annotations

from typing import Any

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
        ctx.options = options
        return shared_table_rope(x, **options)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        with torch.enable_grad():
            x = torch.zeros_like(gradient, requires_grad=True)
            (turned,) = torch.autograd.grad(shared_table_rope(x, **ctx.options), x, gradient)
        return gradient.copy_(turned), None


def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    return _InPlace.apply(x, {"base": base, "offset": offset, "positions_per_chunk": positions_per_chunk})
