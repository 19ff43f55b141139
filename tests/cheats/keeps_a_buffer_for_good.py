"""Caches its largest buffer in a global and never frees it, so that only the first call allocates."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "kept"
_BUFFERS: dict[object, torch.Tensor] = {}


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, *args, **options):
    key = (hidden.device, hidden.dtype, len(hidden), len(weight))
    if key not in _BUFFERS:
        _BUFFERS[key] = torch.empty(len(hidden), len(weight), dtype=hidden.dtype, device=hidden.device)
    _BUFFERS[key].zero_()
    return recompute_linear_cross_entropy(hidden, weight, target, *args, **options)
