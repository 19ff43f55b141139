"""How many layers fit: a few simulated train steps, each a better guess than the last."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...fit import DEFAULT_HIGH, Fit, Tried, bytes_of_capacity, fit_growing
from ...meters import usable_meter
from ...meters.base import Meter, Reading
from ..stage_meter import measured_step
from ..train_state import RepeatedStep
from .settings import ProfileSettings
from .stand_ins import SimulatedOp, op_name, simulated_op
from .trainable import trainable


def most_layers(
    settings: ProfileSettings,
    capacities: Sequence[int | str],
    *,
    gpu: str = "H200",
    high: int | None = None,
    say: Callable[[str], object] = lambda doing: None,
) -> list[Fit]:
    """For each capacity, the most layers with which the run's step fits in it again and again; 0 where none does."""
    limits = [bytes_of_capacity(capacity) for capacity in capacities]
    meter, _ = usable_meter("simulated", gpu)
    op = simulated_op(settings.run, meter, say)
    known: dict[int, Reading] = {}
    start, top = settings.run.model.layers, high or DEFAULT_HIGH

    def reading_at(layers: int) -> Reading:
        return _reading(settings, layers, op, meter, say)

    return [fit_growing(reading_at, limit, start=min(start, top), high=top, known=known) for limit in limits]


@dataclass(frozen=True)
class Grown:
    """What a step takes by the number of its layers, which are all alike: a straight line."""

    op: SimulatedOp
    bytes_a_layer: int
    most: int
    """Layers that fit."""


def grown(
    settings: ProfileSettings, capacity_bytes: int, meter: Meter, say: Callable[[str], object] = lambda doing: None
) -> Grown:
    """By the line through steps of half of the run's layers and of all; :func:`most_layers` tries where it ends."""
    op = simulated_op(settings.run, meter, say)
    few, all_of_them = (
        Tried(layers, _reading(settings, layers, op, meter, say), capacity_bytes)
        for layers in (max(1, settings.run.model.layers // 2), max(2, settings.run.model.layers))
    )
    bytes_a_layer = (all_of_them.bytes - few.bytes) // (all_of_them.value - few.value)
    return Grown(op, bytes_a_layer, max(0, few.value + (capacity_bytes - few.bytes) // bytes_a_layer))


def _reading(
    settings: ProfileSettings, layers: int, op: SimulatedOp, meter: Meter, say: Callable[[str], object]
) -> Reading:
    say(f"{settings.name}, {op_name(settings.run)}: a train step of {layers} layers")
    build = RepeatedStep(trainable, settings.with_model(layers=layers).run, op.put_into)
    # the timelines of all that is tried would be large
    return dataclasses.replace(measured_step(meter, build, op.notes), timeline=None)
