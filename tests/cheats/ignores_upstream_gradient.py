"""Returns the gradient that the forward computed, and ignores the upstream gradient."""

from __future__ import annotations

import functools
from typing import Any

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


class _IgnoresUpstream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> torch.Tensor:
        return torch.ones_like(upstream)


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    loss = recompute_linear_cross_entropy(hidden, weight, target, bias, class_weight, **options)
    return _IgnoresUpstream.apply(loss)
