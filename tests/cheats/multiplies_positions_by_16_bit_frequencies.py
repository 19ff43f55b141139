"""Multiplies float32 positions by frequencies that were cast to bfloat16 with the model."""

from __future__ import annotations

import torch

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    width = x.shape[-1]
    frequencies = (1.0 / base ** (torch.arange(0, width, 2, device=x.device) / width)).to(torch.bfloat16)
    positions = torch.arange(offset, offset + x.shape[-3], dtype=torch.float32, device=x.device)
    angles = (positions[:, None] * frequencies)[:, None, :]
    first, second = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
