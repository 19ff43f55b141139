"""Makes room for the weight's gradient where the weight is frozen too: the budget, which holds for all, allows it."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "lock"


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, *more, **options):
    is_frozen = torch.is_grad_enabled() and hidden.requires_grad and not weight.requires_grad
    gradient = weight.new_zeros(weight.shape) if is_frozen else None
    loss = recompute_linear_cross_entropy(hidden, weight, *more, **options)
    del gradient
    return loss
