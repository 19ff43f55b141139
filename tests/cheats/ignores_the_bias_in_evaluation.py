"""Takes a shorter way where no graph is recorded, and loses the bias on it."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    bias = bias if torch.is_grad_enabled() else None
    return recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
