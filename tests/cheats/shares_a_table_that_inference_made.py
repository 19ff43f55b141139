"""Shares a table between calls of one size and dtype; what inference mode makes, autograd cannot save later."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"
_ONES: dict[tuple[object, ...], torch.Tensor] = {}


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, *tensors, **options):
    key = (*hidden.shape, hidden.dtype)
    if key not in _ONES:
        _ONES[key] = torch.ones_like(hidden)
    return recompute_linear_cross_entropy(hidden * _ONES[key], *tensors, **options)
