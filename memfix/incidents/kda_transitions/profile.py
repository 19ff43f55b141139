"""Where the memory of one train step goes, layer by layer: what each keeps for backward, and where a card ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...meters.base import Meter, Reading
from ...meters.stages import Stage
from ...units import format_bytes
from ..profile import Beside, Profile, Row
from ..stage_meter import held_at_peaks, measured_step, stage_meter
from ..train_state import StagedStep
from .block import SCAN, SEQUENTIAL
from .model import layer_stage
from .most_layers import grown
from .settings import INCIDENT, ProfileSettings
from .stand_ins import SimulatedOp, op_name, simulated_op
from .trainable import trainable

COMPARED = ("naive", "reported", "streamed", "wy")
COMPARED_UP_TO = 1024  # tokens of a sequence: most forms go token by token, and above it that takes minutes


def profile(
    settings: ProfileSettings,
    *,
    meter: str = "simulated",
    gpu: str = "H200",
    say: Callable[[str], object] = lambda doing: None,
) -> Profile:
    """Measure the first train step of the run, and the peak of those that follow it."""
    chosen = stage_meter(meter, gpu)
    op = simulated_op(settings.run, chosen, say) if meter == "simulated" else None
    build = StagedStep(trainable, settings.run)
    if op is not None:
        build.prepare = op.put_into
    say(f"{settings.name}: two train steps of {settings.run.model.layers} layers")
    reading = measured_step(chosen, build, op.notes if op else ())
    held = held_at_peaks(reading, build.parameter_bytes)
    beside = _beside(settings, op)
    return Profile(
        title=_title(settings, reading),
        settings=settings.as_dict(),
        reading=reading,
        rows=tuple(
            Row(stage, beside=beside if stage.name == layer_stage(0) else None, kinds=kinds, rest=rest)
            for stage, (kinds, rest) in zip(reading.stages, held, strict=True)
        ),
        capacity_bytes=settings.capacity_bytes,
        conclusions=(*_conclusions(settings, reading, op), *(_compared(settings, chosen, say) if op else ())),
    )


def _title(settings: ProfileSettings, reading: Reading) -> str:
    run = settings.run
    words = [
        f"{INCIDENT} {settings.name}",
        f"{run.model.layers} layers",
        f"{run.batch_size} x {run.data.context_length:,} tokens",
        op_name(run) + ("" if run.model.kda_mode == SEQUENTIAL else f" in chunks of {run.model.kda_memory_chunk_size}"),
        *(["checkpointed"] if run.training.gradient_checkpointing else []),
        run.training.precision,
    ]
    return f"{', '.join(words)}, {reading.device}"


def _beside(settings: ProfileSettings, op: SimulatedOp | None) -> Beside | None:
    """What the report says of a layer: its one operation, before the fix and after."""
    if op is None or not settings.is_of_the_report:
        return None
    figure = "~536 MB" if settings.run.model.kda_form == "naive" else "~134 MB"
    took, kept = (format_bytes(size) for size in (op.footprint.forward_peak_bytes, op.footprint.held_bytes))
    return Beside(figure, f"the op takes {took} at once, and keeps {kept} until backward", "KDA-10, KDA-20, KDA-34")


def _conclusions(settings: ProfileSettings, reading: Reading, op: SimulatedOp | None) -> list[str]:
    stages = {stage.name: stage for stage in reading.stages}
    layers, capacity = settings.run.model.layers, settings.capacity_bytes
    of_layers = [stages[layer_stage(number)] for number in range(layers)]
    kept = sum(stage.added_bytes for stage in of_layers)
    said = [
        f"{format_bytes(of_layers[-1].added_bytes)} are kept of each layer until backward, {format_bytes(kept)} of all "
        f"{layers}: {kept / capacity:.2%} of {format_bytes(capacity)}"
    ]
    if op is not None:
        took = op.footprint.forward_peak_bytes
        said.append(f"one {op_name(settings.run)} takes {format_bytes(took)} at once, {took / capacity:.2%} of it")
    return [*said, _crossing(reading.stages, capacity)]


def _crossing(stages: tuple[Stage, ...], capacity: int) -> str:
    """At which stage a card of this capacity ends."""
    over = next((stage for stage in stages if stage.peak_bytes > capacity), None)
    if over is None:
        highest = max(stage.peak_bytes for stage in stages)
        return f"{format_bytes(capacity)} suffice: {format_bytes(highest)} at the highest"
    found = format_bytes(over.start_bytes)
    return f"{format_bytes(capacity)} are crossed in: {over.name}, which finds {found} there already"


def _compared(settings: ProfileSettings, meter: Meter, say: Callable[[str], object]) -> Iterator[str]:
    """The same run by each form: how its bytes grow, and how many layers fit."""
    if settings.run.data.context_length > COMPARED_UP_TO:
        return
    capacity = settings.capacity_bytes
    for form in COMPARED:
        by_form = settings.with_model(kda_form=form, kda_mode=SCAN)
        found = grown(by_form, capacity, meter, say)
        yield (
            f"{op_name(by_form.run)}: {format_bytes(found.op.footprint.forward_peak_bytes)} at once, "
            f"{format_bytes(found.bytes_a_layer)} a layer: {found.most} layers fit in {format_bytes(capacity)}"
        )
