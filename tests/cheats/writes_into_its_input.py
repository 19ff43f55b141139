"""Halves its input in place and does not restore it."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    with torch.no_grad():
        hidden.mul_(0.5)
    return loss
