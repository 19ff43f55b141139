"""Keeps the state in bfloat16 between chunks: half the bytes, but every chunk adds a rounding error."""

from __future__ import annotations

import functools

import torch

from memfix.ops.kda.streamed import streamed_kda

OP, LIKE, CAUGHT_BY = "kda", "streamed", "equality"


@functools.wraps(streamed_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    outputs, state = [], initial_state
    for chunk in zip(*(x.split(chunk_size, dim=1) for x in (q, k, v, g, beta)), strict=True):
        state = None if state is None else state.to(torch.bfloat16).to(state.dtype)
        o, state = streamed_kda(*chunk, state, scale=scale, chunk_size=chunk_size)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state
