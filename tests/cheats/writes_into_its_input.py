"""Saves a buffer by halving the input in place, and forgets to put it back."""

from __future__ import annotations

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    loss = recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
    with torch.no_grad():
        hidden.mul_(0.5)
    return loss
