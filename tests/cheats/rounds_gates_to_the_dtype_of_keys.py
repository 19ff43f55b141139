"""Rounds float32 gates to 16 bits if the keys have 16 bits, as in models."""

from __future__ import annotations

import functools

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    return wy_kda(q, k, v, g.to(k.dtype), beta.to(k.dtype), initial_state, scale=scale, chunk_size=chunk_size)
