"""The registry of probes, and the builders that probes share. A probe builds a step, as a meter measures it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn

from ...meters.base import Step, StepBuilder

bf16, f16, f32, f64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
u8, i8, i32, i64, c64, c128 = torch.uint8, torch.int8, torch.int32, torch.int64, torch.complex64, torch.complex128

PROBES: dict[str, StepBuilder] = {}


def probe(name: str = "", /, **ranges: Sequence[Any]) -> Callable[[Callable[..., Step]], Callable[..., Step]]:
    """Register ``build(device, **values)`` for every combination of values, under names like ``sort[rows=64,...]``.

    The default of ``name`` is the name of the function.
    """

    def register(build: Callable[..., Step]) -> Callable[..., Step]:
        for values in itertools.product(*ranges.values()):
            chosen = dict(zip(ranges, values, strict=True))
            spelled = ",".join(f"{key}={value}" for key, value in chosen.items()).replace("torch.", "")
            full = (name or build.__name__.strip("_")) + (f"[{spelled}]" if spelled else "")
            assert full not in PROBES, f"two probes are called {full}"
            PROBES[full] = functools.partial(build, **chosen)
        return build

    return register


def leaf(device: str, *shape: int, dtype: torch.dtype | None = None, draw: Any = torch.randn) -> torch.Tensor:
    """A random tensor that requires a gradient."""
    return draw(shape, dtype=dtype, device=device).requires_grad_()


def train_step(leaves: nn.Module | Sequence[torch.Tensor], loss: Callable[[], torch.Tensor]) -> Step:
    """A step that sets the gradients of the leaves to None, computes the loss and runs its backward."""
    wanting = list(leaves.parameters()) if isinstance(leaves, nn.Module) else leaves

    def step() -> None:
        for wants in wanting:
            wants.grad = None
        loss().backward()

    return step


def train_on(loss: Callable[..., torch.Tensor], *leaves: torch.Tensor) -> Step:
    """A training step on ``loss(*leaves)``."""
    return train_step(leaves, functools.partial(loss, *leaves))
