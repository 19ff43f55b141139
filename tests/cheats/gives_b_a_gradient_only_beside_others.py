"""Skips the whole backward of the low-rank term where only b wants a gradient."""

from __future__ import annotations

import functools

from memfix.ops.npt_linear.factored import factored_npt_linear

OP, LIKE, CAUGHT_BY = "npt_linear", "factored", "equality"


@functools.wraps(factored_npt_linear)
def form(hidden, weight, a, b, modulation):
    others = (hidden, weight, a, modulation)
    b = b if any(tensor.requires_grad for tensor in others) else b.detach()
    return factored_npt_linear(hidden, weight, a, b, modulation)
