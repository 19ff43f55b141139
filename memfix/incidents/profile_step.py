"""``memfix profile``: measures a train step of an incident by stages, beside the figures of its report."""

from __future__ import annotations

from ..fit import bytes_of_capacity
from .config import RunConfig
from .incident import Incident, Say, silent
from .measured_step import SIMULATED, MeasurableStep, Measured, gpu_bytes, read_step, stage_meter
from .profile import Profile, Row


def profile(
    incident: Incident,
    config: RunConfig,
    *,
    meter: str = SIMULATED,
    gpu: str = "H200",
    world_size: int = 1,
    capacity: int | str | None = None,
    say: Say = silent,
) -> Profile:
    """Measure the first train step of a run, and the peak of those that follow it.

    ``world_size`` ranks share the model; one of them is simulated. ``capacity`` is the memory that the step should fit.
    """
    capacity = incident.capacity if capacity is None else capacity
    capacity_bytes = None if capacity is None else bytes_of_capacity(capacity)
    chosen = stage_meter(meter, gpu, world_size)
    simulated = meter == SIMULATED
    stand_ins = incident.stand_ins(config, chosen, say) if simulated else None
    step = MeasurableStep(incident, config, world_size=world_size, stand_ins=stand_ins, simulated=simulated)
    say(f"{incident.name} {config.name}: two train steps")
    reading = read_step(chosen, step.staged, world_size, stand_ins)
    measured = Measured(
        config,
        world_size,
        reading,
        step.parameter_bytes,
        gpu_bytes(chosen, gpu) if capacity_bytes is None else capacity_bytes,
        stand_ins,
        step.asides,
        chosen,
        say,
    )
    return Profile(
        title=_title(incident, measured),
        settings={"config": config.name, "world_size": world_size, **config.as_dict()},
        reading=reading,
        rows=_rows(incident, measured),
        capacity_bytes=measured.capacity_bytes,
        conclusions=tuple(incident.conclusions(measured)),
    )


def _title(incident: Incident, measured: Measured) -> str:
    config = measured.config
    words = [
        f"{incident.name} {config.name}",
        *incident.describe(config),
        *(["checkpointed"] if config.training.gradient_checkpointing else []),
        config.training.precision,
        *([f"rank 0 of {measured.world_size}, FSDP2"] if measured.world_size > 1 else []),
        measured.reading.device,
    ]
    return ", ".join(words)


def _rows(incident: Incident, measured: Measured) -> tuple[Row, ...]:
    beside, asides = incident.beside(measured), measured.asides
    held = measured.held_at_peaks()
    return tuple(
        Row(one, one.name in asides.names, beside.get(one.name), asides.failures.get(one.name), kinds, rest)
        for one, (kinds, rest) in zip(measured.reading.stages, held, strict=True)
    )
