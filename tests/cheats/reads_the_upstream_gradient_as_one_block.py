"""Reads the upstream gradient as if it were contiguous, whatever its strides."""

from __future__ import annotations

from typing import Any

import torch

OP, LIKE, CAUGHT_BY = "embedding", "gather", "equality"


class _OneBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.vocabulary = weight.shape[0]
        return weight.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids,) = ctx.saved_tensors
        rows = gradient.as_strided(gradient.shape, (gradient.shape[1], 1)).to(
            torch.promote_types(gradient.dtype, torch.float32)
        )
        total = rows.new_zeros(ctx.vocabulary, gradient.shape[1]).index_add_(0, ids, rows)
        return None, total.to(gradient.dtype)


def form(ids, weight):
    return _OneBlock.apply(ids, weight)
