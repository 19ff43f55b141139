"""Caches the loss by the shapes of its inputs, so that later calls with other values get a stale loss."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"

_remembered: dict[object, torch.Tensor] = {}


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    key = (hidden.shape, weight.shape, hidden.dtype, *options.items(), bias is None, class_weight is None)
    first = _remembered.setdefault(key, loss.detach().clone())
    return loss + (first - loss.detach())
