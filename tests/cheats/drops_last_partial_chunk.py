"""Ignores the tokens after the last full chunk."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    rows_per_chunk = options["rows_per_chunk"]
    whole = hidden.shape[0] // rows_per_chunk * rows_per_chunk or hidden.shape[0]
    kept = target.clone()
    kept[whole:] = options["ignore_index"]
    return recompute_linear_cross_entropy(hidden, weight, kept, bias, class_weight, **options)
