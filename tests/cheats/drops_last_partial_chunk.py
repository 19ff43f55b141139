"""Counts whole chunks only: the tokens after the last full one are never seen."""

from __future__ import annotations

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    whole = hidden.shape[0] // rows_per_chunk * rows_per_chunk or hidden.shape[0]
    kept = target.clone()
    kept[whole:] = ignore_index
    return recompute_linear_cross_entropy(
        hidden, weight, kept, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
