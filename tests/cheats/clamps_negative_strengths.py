"""Clamps negative strengths to 0: right after a sigmoid, but the op takes negative strengths too."""

from __future__ import annotations

import functools

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    return wy_kda(q, k, v, g, beta.clamp(min=0), initial_state, scale=scale, chunk_size=chunk_size)
