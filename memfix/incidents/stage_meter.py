"""A train step measured by its stages: which meters can do it, and who holds the memory at the peak of each."""

from __future__ import annotations

import dataclasses

import torch

from ..errors import MeasurementError, MeterUnavailable, UsageError
from ..meters import get_meter
from ..meters.base import Meter, Reading, StepBuilder
from ..meters.simulated.gpus import get_gpu
from ..meters.timeline import Allocation
from .profile import Kinds


def stage_meter(name: str, gpu: str) -> Meter:
    """The meter of this name, where it can run here and sees stages."""
    meter = get_meter(name, gpu)
    if name == "nvml":
        raise UsageError("nvml samples a process and sees no stages; use the simulated or the cuda meter")
    reason = meter.unavailable_reason()
    if reason is not None:
        raise MeterUnavailable(f"{name} meter unavailable: {reason}")
    return meter


def gpu_bytes(meter: Meter, gpu: str) -> int:
    """What the GPU has: the one that is simulated, or the one that is there."""
    is_simulated = meter.name == "simulated"
    return get_gpu(gpu).memory_bytes if is_simulated else torch.cuda.get_device_properties(0).total_memory


def measured_step(meter: Meter, build: StepBuilder, notes: tuple[str, ...] = ()) -> Reading:
    """The step's reading. ``notes`` say why it is an estimate where what is measured stands in for something else."""
    try:
        reading = meter.measure(build)
    except torch.OutOfMemoryError as error:
        raise MeasurementError(f"the step itself ran out of memory: {first_line(error)}") from None
    return dataclasses.replace(reading, exact=reading.exact and not notes, notes=(*reading.notes, *notes))


def held_at_peaks(reading: Reading, parameter_bytes: int) -> list[tuple[dict[str, int], tuple[Allocation, ...]]]:
    """For each stage the bytes at its peak by kind, and the lines behind what is of no kind."""
    timeline = reading.timeline
    if timeline is None:
        return [({}, ()) for _ in reading.stages]
    kinds, live = Kinds(timeline, parameter_bytes), timeline.live_bytes
    peaks = (max(range(start - 1, end), key=live.__getitem__) for start, end, _ in timeline.marked_spans())
    return [(kinds.at(event), kinds.rest_at(event)) for event in peaks]


def first_line(error: BaseException) -> str:
    return str(error).splitlines()[0]
