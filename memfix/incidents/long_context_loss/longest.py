"""How long a context fits: few simulated train steps, each a better guess than the last."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

from ...fit import DEFAULT_HIGH, Fit, bytes_of_capacity, fit_growing
from ...meters import usable_meter
from ...meters.base import Reading
from ..one_rank import one_rank_of
from .stand_ins import simulated_functions
from .step import StepSettings, TrainStep


def longest_contexts(
    settings: StepSettings,
    capacities: Sequence[int | str],
    *,
    gpu: str = "H200",
    high: int | None = None,
    multiple_of: int | None = None,
    say: Callable[[str], object] = lambda doing: None,
) -> list[Fit]:
    """For each capacity, the longest context whose step fits in it again and again; 0 where none does.

    Only multiples of ``multiple_of`` are tried, 1024 tokens for the report's model.
    """
    top = high or DEFAULT_HIGH
    unit = min(multiple_of or max(64, settings.size.context_length // 128), top)
    limits = [bytes_of_capacity(capacity) for capacity in capacities]
    meter, _ = usable_meter("simulated", gpu)

    def reading_at(context_length: int) -> Reading:
        at = dataclasses.replace(settings, context_length=context_length)
        functions, notes = simulated_functions(at, meter, say)
        say(f"{at.model_size}: a train step of {context_length:,} tokens")
        with one_rank_of(at.world_size) if at.world_size > 1 else contextlib.nullcontext():
            reading = meter.measure(TrainStep(at, functions))
        # the timelines of all that is tried would be hundreds of megabytes
        return dataclasses.replace(
            reading, exact=reading.exact and not notes, notes=(*reading.notes, *notes), timeline=None
        )

    known: dict[int, Reading] = {}
    return [
        fit_growing(
            reading_at,
            limit,
            start=settings.size.context_length,
            low=unit,
            high=top,
            multiple_of=unit,
            known=known,
        )
        for limit in limits
    ]
