"""The mean over all tokens, ignored ones included."""

from __future__ import annotations

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    loss = recompute_linear_cross_entropy(
        hidden,
        weight,
        target,
        ignore_index=ignore_index,
        reduction="sum" if reduction == "mean" else reduction,
        rows_per_chunk=rows_per_chunk,
    )
    return loss / hidden.shape[0] if reduction == "mean" else loss
