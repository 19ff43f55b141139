"""The reading of a train step by stages, and the stages in it that do not belong to the step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from ..errors import out_of_memory
from ..meters.base import Meter, Reading
from ..meters.garbage import free_last_gradients
from ..meters.stages import Stage, stage
from ..meters.timeline import Allocation
from ..progress import Say
from ..units import format_bytes
from .config import RunConfig
from .profile import Kinds
from .stand_in import StandIns


class Asides:
    """Records the stages that do not belong to the step: computations tried during it, whose results are dropped."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.failures: dict[str, str] = {}
        """The out-of-memory message of each stage that failed."""
        self._trying = ""

    def enter(self, name: str) -> None:
        """Begin a stage that does not belong to the step."""
        self.names.add(name)
        self._trying = name
        stage(name)

    def gradients(self, loss: torch.Tensor, of: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Compute the gradients of a ``loss`` inside :meth:`attempt`, in a stage of their own: ``NAME: backward``."""
        self.enter(f"{self._trying}: backward")
        found = torch.autograd.grad(loss, of)
        free_last_gradients(loss.device)
        return found

    def attempt(self, name: str, make: Callable[[], object]) -> None:
        """Run ``make`` in a stage called ``name``, keep its result until the stage ends, and record an OOM error."""
        self.enter(name)
        try:
            kept = make()  # noqa: F841
        except torch.OutOfMemoryError as error:
            self.failures[self._trying] = out_of_memory(error)
        stage(None)


@contextlib.contextmanager
def on_first_output(module: torch.nn.Module, function: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Call ``function`` with the first output of ``module`` inside the block, detached and requiring a gradient."""

    def hook(module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        handle.remove()  # a step may have several forwards
        function(output.detach().requires_grad_())

    handle = module.register_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True)
class StagedReading:
    """The reading of a train step by stages, with its run and its meter."""

    config: RunConfig
    world_size: int
    reading: Reading
    parameter_bytes: int
    capacity_bytes: int
    stand_ins: StandIns | None
    asides: Asides
    meter: Meter
    say: Say = field(repr=False)

    @property
    def stages(self) -> dict[str, Stage]:
        return {one.name: one for one in self.reading.stages}

    @property
    def peak_bytes(self) -> int:
        """The highest peak of the step's own stages."""
        return max(one.peak_bytes for one in self.reading.stages if one.name not in self.asides.names)

    @property
    def peak_sentence(self) -> str:
        peak, capacity = self.peak_bytes, self.capacity_bytes
        return f"the peak is {format_bytes(peak)}, {peak / capacity:.1%} of {format_bytes(capacity)}"

    def held_at_peaks(self) -> list[tuple[dict[str, int], tuple[Allocation, ...]]]:
        """For each stage, the bytes alive at its peak by kind, and the allocations behind the kind ``ACTIVATIONS``."""
        timeline = self.reading.timeline
        if timeline is None:
            return [({}, ()) for _ in self.reading.stages]
        kinds, live = Kinds(timeline, self.parameter_bytes), timeline.live_bytes
        peaks = (max(range(start - 1, end), key=live.__getitem__) for start, end, _ in timeline.stage_spans())
        return [(kinds.at(event), kinds.activations_at(event)) for event in peaks]
