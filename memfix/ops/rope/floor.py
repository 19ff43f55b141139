"""The time floor of a rope train step: the input and the upstream gradient are read once, and both results written."""

from __future__ import annotations

import torch


@torch.no_grad()
def one_copy(x: torch.Tensor) -> None:
    """Move the bytes of a forward pass: read and write as many as ``x`` has."""
    torch.empty_like(x).copy_(x)


@torch.no_grad()
def two_copies(x: torch.Tensor) -> None:
    """Move the bytes of a train step: those of a forward pass twice, since the gradient is as large as ``x``."""
    one_copy(x)
    one_copy(x)
