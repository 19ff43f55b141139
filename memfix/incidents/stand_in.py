"""A function that takes another's memory without doing its work: measured once, then repeated in every layer.

A sparse attention of 131,072 tokens is tens of thousands of operators, and 36 layers with checkpointing call it over a
hundred times alike. Simulating each call would take an hour, and show the same bytes each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..meters.base import Meter, Step
from ..meters.stages import stage
from ..ops.derivatives import first_derivative_only

_FORWARD, _BACKWARD = "forward", "backward"

TensorFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Footprint:
    """What a function takes above what is live when it is called, and when its backward is."""

    forward_peak_bytes: int
    held_bytes: int
    """Its output, and what it keeps for backward beside its inputs."""
    backward_peak_bytes: int
    notes: tuple[str, ...] = ()
    """Why these are estimates, where they are."""


def measure_footprint(
    meter: Meter,
    function: TensorFunction,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    *,
    keeps_tables: bool,
) -> Footprint:
    """Of ``function`` called with tensors of these shapes, all of which need a gradient.

    ``keeps_tables`` says that its first call leaves behind what others find there, and so is not the one to measure.
    """

    def build(device: str) -> Step:
        inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape, dtype in shapes]
        upstream = torch.empty_like(inputs[0])
        warmups = iter(range(1))

        def step() -> object:
            if next(warmups, None) is not None:
                return function(*inputs) if keeps_tables else None
            stage(_FORWARD)
            out = function(*inputs)
            stage(_BACKWARD)
            return torch.autograd.grad(out, inputs, upstream)

        return step

    reading = meter.measure(build)
    forward, backward = reading.stages
    return Footprint(
        forward.peak_bytes - forward.start_bytes,
        forward.added_bytes,
        backward.peak_bytes - backward.start_bytes,
        reading.notes,
    )


@dataclass(frozen=True)
class StandIn:
    """Called as the function whose ``footprint`` it takes, for a result like its first argument.

    ``keeps_inputs`` says whether the function needs its arguments for backward.
    """

    footprint: Footprint
    keeps_inputs: bool

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = _TakeMemory.apply(self, *tensors)
        return out


class _TakeMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: StandIn, *tensors: torch.Tensor) -> torch.Tensor:
        footprint = stand_in.footprint
        out = torch.empty_like(tensors[0])
        held = out.new_empty(footprint.held_bytes - out.nbytes, dtype=torch.uint8)
        inside = out.new_empty(footprint.forward_peak_bytes - footprint.held_bytes, dtype=torch.uint8)
        del inside
        ctx.save_for_backward(held, *(tensors if stand_in.keeps_inputs else ()))
        ctx.backward_peak_bytes = footprint.backward_peak_bytes
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return out

    @staticmethod
    @first_derivative_only("a stand-in")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients = [upstream.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like]
        rest_bytes = ctx.backward_peak_bytes - sum(gradient.nbytes for gradient in gradients)
        inside = upstream.new_empty(rest_bytes, dtype=torch.uint8)
        del inside
        return None, *gradients
