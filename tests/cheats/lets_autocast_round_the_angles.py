"""Computes angles as a matrix product of positions and frequencies, which autocast rounds to bfloat16."""

from __future__ import annotations

import functools

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


@functools.wraps(shared_table_rope)
def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    if not torch.is_autocast_enabled(x.device.type):
        return shared_table_rope(x, base=base, offset=offset, positions_per_chunk=positions_per_chunk)
    width = x.shape[-1]
    positions = torch.arange(offset, offset + x.shape[-3], dtype=torch.float32, device=x.device)
    frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float32, device=x.device) / width)
    angles = (positions[:, None] @ frequencies[None, :])[:, None, :].float()
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
