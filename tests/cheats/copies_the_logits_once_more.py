"""Keeps the logits of the last chunk, as if to log them: one chunk more than promised, forward and backward."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    last_logits = (hidden[-options["rows_per_chunk"] :] @ weight.T).detach()
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    return loss + 0 * last_logits[0, 0]
