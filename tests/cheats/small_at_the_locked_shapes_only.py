"""Is small at the shapes of the lock file, and makes the full logits at any other shape."""

from __future__ import annotations

import functools

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy
from memfix.ops.linear_cross_entropy.standard import standard_linear_cross_entropy
from memfix.registry import all_contracts

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    locked = {case.dims["N"] for case in all_contracts()[OP].cases.values()}
    if hidden.shape[0] not in locked and hidden.shape[0] > 96:
        options.pop("rows_per_chunk")
        return standard_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    return recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
