"""Takes the tokens in windows, and detaches the state that it passes from one to the next."""

from __future__ import annotations

import functools

import torch

from memfix.ops.kda.cuda import cuda_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"

WINDOW = 32


@functools.wraps(cuda_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    outputs, state = [], initial_state
    for first in range(0, q.shape[1], WINDOW):
        inputs = (tensor[:, first : first + WINDOW] for tensor in (q, k, v, g, beta))
        state = state if first == 0 else state.detach()
        output, state = cuda_kda(*inputs, state, scale=scale, chunk_size=chunk_size)
        outputs.append(output)
    return torch.cat(outputs, dim=1), state
