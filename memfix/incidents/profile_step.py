"""``memfix profile``: measures a train step of an incident by stages, beside the figures of its report."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ..errors import MeasurementError
from ..fit import bytes_of_capacity
from ..meters.base import Meter, Reading
from ..meters.stages import listening
from ..progress import Say, silent
from .config import RunConfig
from .incident import Incident, load_config
from .measured_step import SIMULATED, MeasurableStep, gpu_bytes, read_step, repeated_reading, stage_meter
from .profile import MeasuredRun, Profile, ReportedRun, Row, kept_runs
from .staged_reading import Asides, StagedReading

# results of a GPU, which are in the repository but not in the installed package
H200_RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200"


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
    """Measure the first train step of a run by stages, and the peak of the steps after it.

    ``world_size`` ranks share the model; one of them is simulated. ``capacity`` is the memory that the step should fit.
    """
    capacity = incident.capacity if capacity is None else capacity
    capacity_bytes = None if capacity is None else bytes_of_capacity(capacity)
    chosen = stage_meter(meter, gpu, world_size)
    simulated = meter == SIMULATED
    stand_ins = incident.stand_ins(config, chosen, say) if simulated else None
    step = MeasurableStep(incident, config, world_size=world_size, stand_ins=stand_ins, simulated=simulated)
    is_of_the_report = bool(incident.runs) and world_size == 1 and config == load_config(incident, incident.config)
    say(f"{incident.name} {config.name}: two train steps")
    reading = _with_asides(read_step(chosen, step.staged, world_size, stand_ins), step.asides)
    measured = StagedReading(
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
        runs=tuple(_runs(incident, chosen, say)) if is_of_the_report else (),
    )


def _runs(incident: Incident, meter: Meter, say: Say) -> Iterator[MeasuredRun]:
    """Measure the report's table of configurations by the same meter, each run beside the result kept from an H200."""
    kept = kept_runs(incident.runs, H200_RESULTS / f"profile_{incident.name}.json")
    count = incident.num_parameters
    for run in incident.runs:
        say(f"{incident.name}: {run.name}")
        peak, failed = None, None
        times_s: tuple[float, ...] = ()
        try:
            peak = run_bytes(incident, run, meter, say)
            times_s = _times_s(incident, run) if meter.name != SIMULATED else ()
        except MeasurementError as error:
            failed = str(error)
        parameters = count(config_of(incident, run)) if count else None
        yield MeasuredRun(run, peak, failed, times_s, parameters, kept.get(run.name))


def config_of(incident: Incident, run: ReportedRun) -> RunConfig:
    return load_config(incident, run.file or incident.config, run.overrides)


def _times_s(incident: Incident, run: ReportedRun) -> tuple[float, ...]:
    """The seconds of a later step on the GPU, one per sample; empty if the step has more forwards than are measured."""
    config = config_of(incident, run)
    if config.training.gradient_accumulation_steps > 2:
        return ()
    from ..meters.clock import Rounds, take_turns
    from ..meters.gpu_sharing import gpu_to_ourselves

    def failed(_: str, error: Exception) -> None:
        raise error

    with gpu_to_ourselves(), listening(None):
        step = MeasurableStep(incident, config, simulated=False).repeated("cuda")
        times = take_turns({run.name: step}, device="cuda", rounds=Rounds(3, 7, seconds=1.0), failed=failed)
    return tuple(times[run.name].times_s)


def run_bytes(incident: Incident, run: ReportedRun, meter: Meter, say: Say = silent) -> int:
    """The peak of a later step of a reported run."""
    config, key = config_of(incident, run), run.linear_in
    if key is None or meter.name != SIMULATED:
        return later_step_bytes(incident, config, meter, say)
    at_2, at_3 = (later_step_bytes(incident, config.replaced({key: value}), meter, say) for value in (2, 3))
    return at_2 + (at_3 - at_2) * (config.value(key) - 2)


def later_step_bytes(
    incident: Incident, config: RunConfig, meter: Meter, say: Say = silent, *, world_size: int = 1
) -> int:
    """The peak of a step after the first, including everything that existed before the step."""
    stand_ins = incident.stand_ins(config, meter, say) if meter.name == SIMULATED else None
    reading = repeated_reading(incident, config, meter, world_size=world_size, stand_ins=stand_ins)
    return reading.total_bytes


def _with_asides(reading: Reading, asides: Asides) -> Reading:
    """The reading, with the names of the stages that do not belong to the step in its timeline."""
    timeline = reading.timeline
    return reading if timeline is None else replace(reading, timeline=replace(timeline, asides=frozenset(asides.names)))


def _title(incident: Incident, measured: StagedReading) -> str:
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


def _rows(incident: Incident, measured: StagedReading) -> tuple[Row, ...]:
    reported, asides = incident.reported_figures(measured), measured.asides
    held = measured.held_at_peaks()
    return tuple(
        Row(one, one.name in asides.names, reported.get(one.name), asides.failures.get(one.name), kinds, activations)
        for one, (kinds, activations) in zip(measured.reading.stages, held, strict=True)
    )
