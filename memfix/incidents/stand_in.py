"""Stand-ins: functions that allocate as much memory as another function does, measured once, and compute nothing.

A sparse attention of 131,072 tokens runs tens of thousands of operators, and 36 layers with checkpointing make over a
hundred identical calls. Simulating every call would take an hour and give the same bytes each time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
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
    """The memory that a function takes above what is live when the function, or its backward, is called."""

    forward_peak_bytes: int
    held_bytes: int
    """The bytes of the output and of what the function keeps for backward, without its inputs."""
    backward_peak_bytes: int
    notes: tuple[str, ...] = ()
    """Reasons why the figures are estimates, if any."""


def measure_footprint(
    meter: Meter,
    function: TensorFunction,
    shapes: Sequence[tuple[tuple[int, ...], torch.dtype]],
    *,
    keeps_tables: bool,
) -> Footprint:
    """Measure the footprint of ``function`` for tensors of these shapes, all of which require a gradient.

    ``keeps_tables`` says that the first call fills caches for later calls; then a later call is measured.
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


@contextlib.contextmanager
def saved_for_backward() -> Iterator[dict[int, torch.UntypedStorage]]:
    """The storages that autograd saves inside the block, by their identity."""
    saved: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def kept_inputs(
    meter: Meter, function: TensorFunction, shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]
) -> tuple[bool, ...]:
    """For each argument, whether ``function`` keeps it for backward: whether autograd saves it or a view of it."""
    found: list[bool] = []

    def build(device: str) -> Step:
        inputs = [torch.empty(shape, dtype=dtype, device=device, requires_grad=True) for shape, dtype in shapes]

        def step() -> None:
            with saved_for_backward() as saved:
                function(*inputs)
            found.extend(tensor.untyped_storage()._cdata in saved for tensor in inputs)

        return step

    meter.measure(build, warmup=0)
    return tuple(found)


@dataclass(frozen=True)
class StandIn:
    """A replacement for a function, with the same ``footprint``. Its result has the shape of the first argument.

    ``keeps_inputs`` says for each argument whether the function keeps it for backward.
    """

    footprint: Footprint
    keeps_inputs: Sequence[bool]

    def __call__(self, *tensors: torch.Tensor) -> torch.Tensor:
        return _TakeMemory.apply(self, *tensors)


@dataclass(frozen=True)
class StandIns:
    """The stand-ins for functions of a model, which ``put_into(model)`` installs."""

    put_into: Callable[[torch.nn.Module], None]
    op: Footprint | None = None
    """The footprint of the op that the report is about, if it has a stand-in."""
    notes: tuple[str, ...] = ()
    """Reasons why a reading with these stand-ins is an estimate, if any."""


class _TakeMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stand_in: StandIn, *tensors: torch.Tensor) -> torch.Tensor:
        footprint = stand_in.footprint
        out = torch.empty_like(tensors[0])
        held = out.new_empty(footprint.held_bytes - out.nbytes, dtype=torch.uint8)
        inside = out.new_empty(footprint.forward_peak_bytes - footprint.held_bytes, dtype=torch.uint8)
        del inside
        kept = (tensor for tensor, is_kept in zip(tensors, stand_in.keeps_inputs, strict=True) if is_kept)
        ctx.save_for_backward(held, *kept)
        ctx.backward_peak_bytes = footprint.backward_peak_bytes
        ctx.like = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return out

    @staticmethod
    @first_derivative_only("a stand-in")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        held, *kept = ctx.saved_tensors  # noqa: RUF059 - kept until the end
        inside_bytes = held.nbytes + ctx.backward_peak_bytes
        # freed before the gradients are made, because the function too frees during backward what it holds
        del held
        ctx.maybe_clear_saved_tensors()
        inside = upstream.new_empty(inside_bytes, dtype=torch.uint8)
        del inside
        return None, *(upstream.new_empty(shape, dtype=dtype) for shape, dtype in ctx.like)
