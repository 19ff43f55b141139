"""Measures the train step of a run on one batch: a later step as a whole, or the first step divided into stages."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch.utils import _pytree

from ..errors import MeasurementError, UsageError, out_of_memory
from ..meters import usable_meter
from ..meters.base import Meter, Reading, Step, StepBuilder
from ..meters.one_rank import one_rank_of
from ..meters.simulated.gpus import get_gpu
from ..meters.simulated.tracking import state_range
from ..meters.stages import listening, stage
from .config import RunConfig
from .distributed import World
from .examples import Examples
from .incident import Batch, Incident
from .profile import LATER_STEP, PARAMETERS, STEP_FAILED_PREFIX
from .staged_reading import Asides
from .stand_in import StandIns
from .step import TrainStep, map_tensors, on_device

SIMULATED = "simulated"


class MeasurableStep:
    """A train step on the run's first batch. A meter builds :meth:`repeated` or :meth:`staged`.

    With ``simulated``, tensors have no values: only the shapes and the integer ranges of the batch are used, and the
    warm-up runs on a part of it.
    """

    def __init__(
        self,
        incident: Incident,
        config: RunConfig,
        *,
        world_size: int = 1,
        stand_ins: StandIns | None = None,
        simulated: bool = True,
    ) -> None:
        self._incident, self._config, self._world_size = incident, config, world_size
        self._stand_ins, self._simulated = stand_ins, simulated
        # loaded before a simulation begins, because tensors have no values inside it
        self._batch = incident.data(config)(Examples(range(config.batch_size), config.data.seed))
        self._ranges = {id(leaf): _range(leaf) for leaf in _pytree.tree_leaves(self._batch)}
        accumulated = config.training.gradient_accumulation_steps
        # later forwards start with the same memory in use as the second
        self._num_forwards = min(2, accumulated)
        self._num_targets = incident.num_targets(self._batch) * accumulated * world_size
        self.asides = Asides()
        self.parameter_bytes = 0
        """Set when the step is built."""

    def repeated(self, device: str) -> Step:
        """Build a later step of a run: the warm-up makes the optimizer's states."""
        step, batch = self._built(device)
        warm_ups = [self._warm_up(batch)]

        def run() -> None:
            self._take(step, [warm_ups.pop()] if warm_ups else [batch] * self._num_forwards)

        return run

    def staged(self, device: str) -> Step:
        """Build the first step of a run by stages, and a second step, which finds the optimizer's states in place."""
        step, batch = self._built(device)
        warm_ups, batches = [self._warm_up(batch)], [batch] * self._num_forwards

        def run() -> None:
            if warm_ups:
                # no optimizer step: its states must not exist before the first measured step
                step.accumulate([warm_ups.pop()], self._num_targets)
                step.forget_gradients()
                return
            stage(PARAMETERS)
            # asides need an unsharded model
            is_whole = self._world_size == 1
            with self._incident.asides(step.model, batch, self.asides) if is_whole else contextlib.nullcontext():
                self._take(step, batches)
            stage(LATER_STEP)
            with listening(None):
                self._take(step, batches)

        return run

    def _built(self, device: str) -> tuple[TrainStep, Batch]:
        world = World(0, self._world_size, torch.device(device))
        with torch.device(device):
            prepare = self._stand_ins.put_into if self._stand_ins else lambda model: None
            step = TrainStep(self._incident, self._config, world, prepare)
        self.parameter_bytes = step.parameter_bytes
        if not self._simulated:
            return step, on_device(self._batch, world.device)
        return step, map_tensors(self._batch, lambda tensor: self._without_values(tensor, device))

    def _without_values(self, tensor: torch.Tensor, device: str) -> torch.Tensor:
        like = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        stated = self._ranges[id(tensor)]
        if stated is not None:
            state_range(like, *stated)
        return like

    def _warm_up(self, batch: Batch) -> Batch:
        return self._incident.warm_up(batch) if self._simulated else batch

    def _take(self, step: TrainStep, batches: list[Batch]) -> None:
        step.take(batches, self._num_targets, lambda loss_sum, norm: True)


def _range(leaf: Any) -> tuple[int, int] | None:
    """The smallest integer of a tensor, and its largest plus one; None for other leaves."""
    is_integers = isinstance(leaf, torch.Tensor) and leaf.dtype in (torch.int32, torch.int64) and leaf.numel() > 0
    return (int(leaf.min()), int(leaf.max()) + 1) if is_integers else None


def stage_meter(name: str, gpu: str, world_size: int = 1) -> Meter:
    """The meter called ``name``. Refuses one that cannot run here or does not see stages."""
    if name == "nvml":
        raise UsageError("nvml samples a process and sees no stages; use the simulated or the cuda meter")
    if world_size < 1:
        raise UsageError(f"world_size must be at least 1, got {world_size}")
    if name != SIMULATED and world_size > 1:
        raise UsageError(
            f"only the simulated meter can measure one rank of {world_size} without the others: use it, or world_size 1"
        )
    return usable_meter(name, gpu)


def gpu_bytes(meter: Meter, gpu: str) -> int:
    """The memory of the simulated GPU, or of the real one."""
    is_simulated = meter.name == SIMULATED
    return get_gpu(gpu).memory_bytes if is_simulated else torch.cuda.get_device_properties(0).total_memory


def repeated_reading(
    incident: Incident, config: RunConfig, meter: Meter, *, world_size: int = 1, stand_ins: StandIns | None = None
) -> Reading:
    """The reading of a later step of a run, without its stages."""
    simulated = meter.name == SIMULATED
    step = MeasurableStep(incident, config, world_size=world_size, stand_ins=stand_ins, simulated=simulated)

    def without_stages(device: str) -> Step:
        run = step.repeated(device)

        def silenced() -> None:
            with listening(None):  # recording the stages of hundreds of layers would take as long as the step
                run()

        return silenced

    reading = read_step(meter, without_stages, world_size, stand_ins)
    # a search keeps many readings, whose timelines would take hundreds of megabytes
    return dataclasses.replace(reading, timeline=None)


def read_step(meter: Meter, build: StepBuilder, world_size: int = 1, stand_ins: StandIns | None = None) -> Reading:
    """The reading of a step on one rank of ``world_size``: an estimate if the stand-ins have notes."""
    notes = stand_ins.notes if stand_ins else ()
    try:
        with one_rank_of(world_size) if world_size > 1 else contextlib.nullcontext():
            reading = meter.measure(build)
    except torch.OutOfMemoryError as error:
        raise MeasurementError(f"{STEP_FAILED_PREFIX}{out_of_memory(error)}") from None
    return dataclasses.replace(reading, exact=reading.exact and not notes, notes=(*reading.notes, *notes))
