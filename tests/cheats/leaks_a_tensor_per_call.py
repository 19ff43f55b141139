"""Appends the loss of every call to a global list."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "leak"

_history = []


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    _history.append(loss.detach().clone())
    return loss
