"""Remembers the loss by shape, as a benchmark would love it to."""

from __future__ import annotations

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"

_remembered: dict[object, torch.Tensor] = {}


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    loss = recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
    key = (hidden.shape, weight.shape, hidden.dtype, ignore_index, reduction)
    first = _remembered.setdefault(key, loss.detach().clone())
    return loss + (first - loss.detach())
