"""Divides the mean loss by the number of all tokens, ignored ones included."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    is_mean = options["reduction"] == "mean"
    options["reduction"] = "sum" if is_mean else options["reduction"]
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    return loss / hidden.shape[0] if is_mean else loss
