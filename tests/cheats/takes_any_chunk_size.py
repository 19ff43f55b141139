"""Reads a chunk size of zero as 'all at once' instead of refusing it."""

from __future__ import annotations

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "bad input"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    return recompute_linear_cross_entropy(
        hidden,
        weight,
        target,
        ignore_index=ignore_index,
        reduction=reduction,
        rows_per_chunk=rows_per_chunk or hidden.shape[0],
    )
