"""A train step of a model whose result is not known: any tensors in any containers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from memfix.meters.base import Step, StepBuilder

from ..third_party.training import Batch, train

Made = Callable[[], nn.Module]
MOST_PARAMETERS = 500_000_000


def require_few_parameters(make: Made) -> None:
    """Raise if a model is too large. A model that reads values while it is built cannot be counted, and passes."""
    try:
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in make().parameters())
    except NotImplementedError:
        return
    if size > MOST_PARAMETERS:
        raise MemoryError(f"{size:,} parameters")


def trained(make: Made, batch: Batch, call: Callable[[nn.Module, Any], Any]) -> StepBuilder:
    """Return the builder of a train step. ``call`` calls the model with the batch."""
    return functools.partial(_built, make, batch, call)


def _built(make: Made, batch: Batch, call: Callable[[nn.Module, Any], Any], device: str) -> Step:
    torch.manual_seed(0)
    return train(make(), batch, device, loss_of=lambda model, batch: bounded_loss(call(model, batch)))


def bounded_loss(answer: Any) -> torch.Tensor:
    """Return a loss between 0 and 1 of all floats in a model's result: random weights may give large numbers."""
    squares = [tensor.float().square().mean() for tensor in _floats(answer)]
    if not squares:
        raise TypeError(f"the model returns no floats but a {type(answer).__name__}")
    return torch.stack(squares).sum().tanh()


def _floats(answer: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of floats in a result that depend on the model's weights."""
    if isinstance(answer, torch.Tensor):
        if answer.requires_grad:
            yield answer.abs() if answer.is_complex() else answer
    elif isinstance(answer, (Mapping, list, tuple)):
        for part in answer.values() if isinstance(answer, Mapping) else answer:
            yield from _floats(part)
    elif hasattr(answer, "__dict__"):  # a dataclass, such as a distribution of latents
        yield from _floats(vars(answer))
