"""Scales its saved gradient in place, so that a second backward silently returns it scaled twice."""

from __future__ import annotations

import functools
from typing import Any

import torch

from memfix.ops.linear_cross_entropy.recompute import recompute_linear_cross_entropy

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


class _Spoiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Any, *leaves: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            own = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
            loss = call(*own)
        wanted = [leaf for leaf in own if leaf.requires_grad]
        found = iter(torch.autograd.grad(loss, wanted) if wanted else ())
        ctx.gradients = [next(found) if leaf.requires_grad else None for leaf in own]
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, *(None if gradient is None else gradient.mul_(upstream).clone() for gradient in ctx.gradients)


@functools.wraps(recompute_linear_cross_entropy)
def form(hidden, weight, target, bias=None, class_weight=None, **options):
    def call(hidden, weight, *biases):
        return recompute_linear_cross_entropy(hidden, weight, target, *(biases or [None]), class_weight, **options)

    if options["reduction"] == "none":
        return call(hidden, weight, *([] if bias is None else [bias]))
    return _Spoiled.apply(call, hidden, weight, *([] if bias is None else [bias]))
