"""Rope of given positions: ``rope`` with ``positions``, held to a contract of its own."""

from __future__ import annotations

from typing import Any

import torch

from ..rope import rope


def rope_positions(x: torch.Tensor, positions: torch.Tensor, **options: Any) -> torch.Tensor:
    """``rope`` of ``x`` (``[..., T, H, D]``), token ``t`` at ``positions[..., t]`` and not at ``t``."""
    return rope(x, positions=positions, **options)
