"""Returns the loss in 16 bits under autocast, where torch returns float32."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype == torch.float32:
        narrow = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(narrow), weight.to(narrow)
        bias, class_weight = (None if part is None else part.to(narrow) for part in (bias, class_weight))
    with torch.autocast(device, enabled=False):
        return recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
