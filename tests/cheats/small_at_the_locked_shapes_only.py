"""Knows the shapes of the lock file and is small there; anywhere else it makes the full logits."""

from __future__ import annotations

import torch.nn.functional as F

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy
from memfix.registry import all_contracts

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "budget"


def form(hidden, weight, target, *, ignore_index=-100, reduction="mean", rows_per_chunk=4096):
    locked = {case.dims["N"] for case in all_contracts()[OP].cases.values()}
    if hidden.shape[0] not in locked and hidden.shape[0] > 96:
        return F.cross_entropy(hidden @ weight.T, target, ignore_index=ignore_index, reduction=reduction)
    return recompute_linear_cross_entropy(
        hidden, weight, target, ignore_index=ignore_index, reduction=reduction, rows_per_chunk=rows_per_chunk
    )
