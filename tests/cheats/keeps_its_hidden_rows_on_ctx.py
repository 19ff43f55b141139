"""Keeps hidden as an attribute of ctx: after a change in place, gradients would be wrong without an error."""

from __future__ import annotations

import functools

import torch

from memfix.ops.npt_linear.factored import factored_npt_linear

OP, LIKE, CAUGHT_BY = "npt_linear", "factored", "equality"


class _Tap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, result, hidden):
        ctx.hidden = hidden
        return result.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert ctx.hidden.shape[:-1] == gradient.shape[:-1]
        return gradient, None


@functools.wraps(factored_npt_linear)
def form(hidden, *args, **options):
    return _Tap.apply(factored_npt_linear(hidden, *args, **options), hidden)
