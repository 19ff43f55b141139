"""What every theme's steps are made of: tensors, gradients to drop, and the dict they are gathered in."""

from __future__ import annotations

import torch
from torch import nn

from memfix.meters.base import StepBuilder

MIB = 1 << 20


class Workloads(dict[str, StepBuilder]):
    """Builders by name."""

    def add(self, build: StepBuilder) -> StepBuilder:
        """As a decorator: under the builder's own name."""
        self[build.__name__] = build
        return build


def normal(*size: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=device, dtype=dtype)


def leaf(*size: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return normal(*size, device=device, dtype=dtype).requires_grad_()


def drop_gradients(*owners: torch.Tensor | nn.Module) -> None:
    """Before the step and not after it, as in a training loop: gradients count as memory that was there before."""
    for owner in owners:
        for tensor in owner.parameters() if isinstance(owner, nn.Module) else [owner]:
            tensor.grad = None
