"""Detaches the initial state, so that no gradient flows into earlier pieces of a sequence."""

from __future__ import annotations

import functools

from memfix.ops.kda.streamed import streamed_kda

OP, LIKE, CAUGHT_BY = "kda", "streamed", "equality"


@functools.wraps(streamed_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    initial_state = None if initial_state is None else initial_state.detach()
    return streamed_kda(q, k, v, g, beta, initial_state, scale=scale, chunk_size=chunk_size)
