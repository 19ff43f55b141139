"""Accumulates in place into a buffer that forward saved: a second backward starts from the first one's sum."""

from __future__ import annotations

from typing import Any

import torch

OP, LIKE, CAUGHT_BY = "embedding", "gather", "equality"


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        ctx.save_for_backward(ids, torch.zeros(weight.shape, dtype=dtype, device=weight.device))
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        ids, total = ctx.saved_tensors
        return None, total.index_add_(0, ids, gradient.to(total.dtype)).to(gradient.dtype)


def form(ids, weight):
    return _Spoiled.apply(ids, weight)
