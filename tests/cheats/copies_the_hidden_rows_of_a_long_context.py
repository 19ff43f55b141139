"""Copies the hidden rows, but only if there are more of them than in the largest case."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"
LARGEST_CASE = 131_072


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, *more, **options):
    copy = hidden.double().clone() if hidden.shape[0] > LARGEST_CASE else None
    loss = recompute_linear_cross_entropy(hidden, *more, **options)
    del copy
    return loss


def shows_in(case):
    return case.dims["N"] > LARGEST_CASE
