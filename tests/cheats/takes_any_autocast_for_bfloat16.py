"""Works in bfloat16 under every autocast, also under one to float16, which rounds to eight times as many digits."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, *args, **options):
    device = hidden.device.type
    with torch.autocast(device, torch.bfloat16, enabled=torch.is_autocast_enabled(device)):
        return recompute_linear_cross_entropy(hidden, weight, target, *args, **options)
