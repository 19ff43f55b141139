"""The offload as it was published: b goes to the CPU without its graph, and trains nothing."""

from __future__ import annotations

import functools

from memfix.ops.npt_linear.factored import factored_npt_linear

OP, LIKE, CAUGHT_BY = "npt_linear", "factored", "equality"


@functools.wraps(factored_npt_linear)
def form(hidden, weight, a, b, modulation):
    return factored_npt_linear(hidden, weight, a, b.detach().cpu().to(hidden.device), modulation)
