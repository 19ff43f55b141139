"""Masks the decays between pairs after the exponential: outputs are right, gradients are 0 x infinity."""

from __future__ import annotations

import functools

import torch

from memfix.ops.kda.wy import wy_kda

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


@functools.wraps(wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    dtype, (q, k, v, g) = q.dtype, (x.to(wide).transpose(1, 2) for x in (q, k, v, g))
    beta = beta.to(wide).transpose(1, 2).unsqueeze(-1)
    sums = g.cumsum(2)
    decay = (sums.unsqueeze(3) - sums.unsqueeze(2)).exp()
    lower = torch.ones(decay.shape[2:4], dtype=torch.bool, device=q.device).tril()
    decay = decay.masked_fill(~lower[..., None], 0)
    among_keys = (k.unsqueeze(3) * k.unsqueeze(2) * decay).sum(-1).tril(-1)
    before = torch.zeros((), dtype=wide) if initial_state is None else (sums.exp() * k) @ initial_state
    system = torch.eye(q.shape[2], dtype=wide) + beta * among_keys
    written = torch.linalg.solve_triangular(system, beta * (v - before), upper=False)
    o = (q.unsqueeze(3) * k.unsqueeze(2) * decay).sum(-1).tril() @ written
    state = (k * decay[:, :, -1]).mT @ written
    if initial_state is not None:
        o = o + (sums.exp() * q) @ initial_state
        state = state + sums[:, :, -1].exp().unsqueeze(-1) * initial_state
    return (scale * o).transpose(1, 2).to(dtype), state
