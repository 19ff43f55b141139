"""Passes the state to the next chunk without the decay of that chunk's first token."""

from __future__ import annotations

import functools

import torch

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    token = torch.arange(q.shape[1], device=q.device)
    is_first = (token > 0) & (token % chunk_size == 0)
    g = g.masked_fill(is_first[:, None, None], 0)
    return wy_kda(q, k, v, g, beta, initial_state, scale=scale, chunk_size=chunk_size)
