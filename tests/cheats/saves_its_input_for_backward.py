"""Turns each pair by an angle, and saves the whole input for backward, which needs only the angles."""

from __future__ import annotations

import functools

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "budget"


class _Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, options):
        ctx.x, ctx.options = x, options
        return shared_table_rope(x, **options)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(shared_table_rope(x, **ctx.options), x, gradient)
        return grad, None


@functools.wraps(shared_table_rope)
def form(x, **options):
    return _Saves.apply(x, options)
