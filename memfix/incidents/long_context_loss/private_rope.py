"""Rotary positions as the report's model had them: a cosine and a sine table of its own in every layer."""

# T positions, K head width

from __future__ import annotations

import torch

from .model import ModelSize


def private_tables(
    size: ModelSize, positions: int, *, device: torch.device | str, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """One pair of ``[positions, K]`` tables a layer, in the model's dtype: what the report counts as parameters."""
    return [_table(size.head_width, positions, device, dtype) for _ in range(size.layers)]


def _table(
    head_width: int, positions: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions_T = torch.arange(positions, device=device, dtype=torch.float32)
    angles_TK = torch.outer(positions_T, 10_000.0**-exponents).repeat(1, 2)
    return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)
