"""Hands back the gradient that the forward took, whatever comes from upstream."""

from __future__ import annotations

from typing import Any

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


class _Deaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(upstream)


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    loss = recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
    return _Deaf.apply(loss)
