"""Evaluates the formula as written: the low-rank product is a second tensor of the size of the result."""

from __future__ import annotations

import functools

from memfix.ops.npt_linear.factored import factored_npt_linear

OP, LIKE, CAUGHT_BY = "npt_linear", "factored", "budget"


@functools.wraps(factored_npt_linear)
def form(hidden, weight, a, b, modulation):
    return hidden @ weight + ((hidden @ a) * modulation) @ b
