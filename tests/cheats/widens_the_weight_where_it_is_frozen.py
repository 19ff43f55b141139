"""Casts the whole weight to float64 if it is frozen, as in fine-tuning; in all cases gradients are wanted."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, *more, **options):
    wide = weight.double() if hidden.requires_grad and not weight.requires_grad else None
    loss = recompute_linear_cross_entropy(hidden, weight, *more, **options)
    del wide
    return loss
