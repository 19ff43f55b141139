"""The floor below every train step of rope: its input and its gradient are read once, and their turns written once."""

from __future__ import annotations

import torch


@torch.no_grad()
def one_copy(x: torch.Tensor) -> None:
    """The bytes of a forward pass: those of ``x``, read and written."""
    torch.empty_like(x).copy_(x)


@torch.no_grad()
def two_copies(x: torch.Tensor) -> None:
    """The bytes of a train step: those of ``x`` twice, once for the gradient, which has the same size."""
    one_copy(x)
    one_copy(x)
