"""Allocates the gradient with ``empty`` and never writes rows without an id: often zero, by luck."""

from __future__ import annotations

from typing import Any

import torch

OP, LIKE, CAUGHT_BY = "embedding", "gather", "equality"


class _Unwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,) = ctx.saved_tensors
        total = gradient.new_empty(ctx.shape)
        total[ids] = 0
        return None, total.index_add_(0, ids, gradient)


def form(ids, weight):
    return _Unwritten.apply(ids, weight)
