"""Keeps the last loss of every call in a list, for a plot that nobody draws."""

from __future__ import annotations

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "leak"

_history = []


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    loss = recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
    _history.append(loss.detach().clone())
    return loss
