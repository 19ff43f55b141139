"""``memfix fit`` for an incident: the largest value of a config key, or the fewest ranks, for which a step fits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ..errors import UsageError, did_you_mean
from ..fit import DEFAULT_HIGH, MOST_RANKS, Fit, bytes_of_capacity, fit_growing, fit_ranks
from ..meters.base import Reading
from ..progress import Say, silent
from .config import RunConfig
from .incident import Growth, Incident
from .measured_step import SIMULATED, repeated_reading, stage_meter

WORLD_SIZE = "world_size"


def growth_of(incident: Incident, key: str | None) -> Growth:
    """The incident's :class:`Growth` of the config key ``key``; the first one if ``key`` is None."""
    known = {growth.key: growth for growth in incident.grows}
    if key is not None and key not in known:
        raise UsageError(f"{incident.name} cannot grow {key!r}{did_you_mean(key, [*known, WORLD_SIZE])}")
    return incident.grows[0] if key is None else known[key]


def fit_step(
    incident: Incident,
    config: RunConfig,
    growth: Growth,
    capacities: Sequence[int | str],
    *,
    gpu: str = "H200",
    high: int | None = None,
    world_size: int = 1,
    say: Say = silent,
) -> list[Fit]:
    """For each capacity, the largest value of the key with which a later step fits; 0 if none does."""
    limits = [bytes_of_capacity(capacity) for capacity in capacities]
    top, start = high or DEFAULT_HIGH, config.value(growth.key)
    unit = min(growth.multiple_of(config), top)
    meter = stage_meter(SIMULATED, gpu, world_size)
    shared = incident.stand_ins(config, meter, say) if growth.keeps_stand_ins else None
    known: dict[int, Reading] = {}

    def reading_at(value: int) -> Reading:
        at = config.replaced({growth.key: value})
        stand_ins = shared if growth.keeps_stand_ins else incident.stand_ins(at, meter, say)
        say(f"{incident.name} {config.name}: a train step of {value:,} {growth.unit}")
        return repeated_reading(incident, at, meter, world_size=world_size, stand_ins=stand_ins)

    return [
        fit_growing(reading_at, limit, start=start, low=unit, high=top, multiple_of=unit, known=known)
        for limit in limits
    ]


def fit_world(
    incident: Incident,
    config: RunConfig,
    capacities: Sequence[int | str],
    *,
    gpu: str = "H200",
    high: int | None = None,
    say: Say = silent,
) -> list[Fit]:
    """For each capacity, the fewest ranks (1, 2, 4, ...) that shard the model so that a step fits; 0 if none do."""
    meter = stage_meter(SIMULATED, gpu)
    stand_ins = incident.stand_ins(config, meter, say)

    @functools.cache
    def reading_at(world_size: int) -> Reading:
        say(f"{incident.name} {config.name}: a train step on one rank of {world_size:,}")
        return repeated_reading(incident, config, meter, world_size=world_size, stand_ins=stand_ins)

    return [fit_ranks(reading_at, capacity, high=high or MOST_RANKS) for capacity in capacities]
