"""Takes the dtype to compute in from the gates, whose dtype may be narrower than that of the keys."""

from __future__ import annotations

import functools

import torch

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    wide = torch.promote_types(g.dtype, torch.float32)
    initial_state = None if initial_state is None else initial_state.to(wide)
    tensors = (tensor.to(wide) for tensor in (q, k, v, g, beta))
    outputs, state = wy_kda(*tensors, initial_state, scale=scale, chunk_size=chunk_size)
    return outputs.to(q.dtype), state.to(torch.promote_types(q.dtype, torch.float32))
