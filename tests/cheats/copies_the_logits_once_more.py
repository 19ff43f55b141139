"""Holds the last chunk for a log line: one chunk more than promised, forward and backward."""

from __future__ import annotations

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    last_logits = (hidden[-rows_per_chunk:] @ weight.T).detach()
    loss = recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
    return loss + 0 * last_logits[0, 0]
