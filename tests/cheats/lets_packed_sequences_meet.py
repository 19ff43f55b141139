"""Treats packed sequences as one: each starts from the final state of the one before it."""

from __future__ import annotations

import functools

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda_packed", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, cu_seqlens=None, *, scale=None, chunk_size=64):
    _, states = wy_kda(q, k, v, g, beta, initial_state, cu_seqlens, scale=scale, chunk_size=chunk_size)
    first = None if initial_state is None else initial_state[:1]
    joined, _ = wy_kda(q, k, v, g, beta, first, scale=scale, chunk_size=chunk_size)
    return joined, states
