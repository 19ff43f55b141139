"""Measure one form at one call, in each phase. Warm-up calls are skipped where the form needs none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from ..errors import MemfixError, out_of_memory
from ..laws import Phase
from ..meters import get_meter
from ..meters.base import Meter, Reading, Simulation
from ..meters.timeline import Timeline, rounded
from .form_call import FormCall
from .inputs import Draw, StepsOf
from .plan import Outcome
from .saved import saved_reading

_IN_TURN: tuple[Phase, ...] = ("forward", "held", "train")


def measure(call: FormCall, phase: Phase, meter: Meter) -> Reading:
    """Measure one phase alone, with a warm-up."""
    return meter.measure(call.step(phase))


def with_lines(call: FormCall, phase: Phase, reading: Reading) -> Reading:
    """The reading with the lines behind its bytes. The host meter looks them up in a measurement of its own."""
    return get_meter("host").measure(call.step(phase)) if reading.meter == "host" else reading


def measure_case(call: FormCall, meter: Meter) -> Outcome:
    """The readings of every phase, and a finding for each that has none. A phase that does not fit the GPU is
    simulated."""
    meter, readings = fitted(meter, call)
    errors = []
    phases = [phase for phase in call.phases if phase not in readings]
    try:
        measured = measure_phases(call, [*phases, *phases_beside(phases)] if phases else [], meter)
        readings |= {phase: reading for phase, reading in measured.items() if phase in phases or reading.peak_bytes}
    except Exception:  # one phase failed, and the others may not
        for phase in phases:
            try:
                readings[phase] = measure(call, phase, meter)
            except Exception as error:
                errors.append(call.finding("memory", "error", not_measured(meter, error), phase))
    return Outcome(tuple(errors), readings)


def not_measured(meter: Meter, error: Exception) -> str:
    """The message of a finding about a measurement that raised ``error``."""
    what = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        what = out_of_memory(error)
    return f"could not be measured, meter {meter.name}: {what}"


def phases_beside(phases: Sequence[Phase]) -> list[Phase]:
    """The phases that are read along with ``phases``, without a step of their own; entries of 0 bytes are left out."""
    return ["saved", "kept"] if "train" in phases else ["kept"]


def measure_phases(call: FormCall, phases: Collection[Phase], meter: Meter) -> dict[Phase, Reading]:
    """A reading for each of ``phases``, which may include ``saved`` and ``kept``.

    The simulated meter runs the phases one after the other on the same inputs, without warm-ups, if the form needs none
    and leaks nothing.
    """
    in_order = [phase for phase in _IN_TURN if phase in phases]
    if phases and not in_order:
        in_order = [call.phases[-1]]
    readings: dict[Phase, Reading] = {}
    simulation = meter.simulation
    if simulation is not None and _needs_no_warm_up(call, simulation):
        (readings,) = _in_turn(call, in_order, simulation) or ({},)
    if not readings or any(reading.leaked_bytes for reading in readings.values()):
        readings = {phase: measure(call, phase, meter) for phase in in_order}
    if "kept" in phases:
        of_kept = [reading.kept_reading() for reading in readings.values()]
        # max takes the first of equal ones: it was made in this simulation, so its line is known
        readings["kept"] = max(of_kept, key=lambda reading: reading.peak_bytes)
    if "saved" in phases:
        readings["saved"] = saved_reading(call, like=next(iter(readings.values())))
    return readings


def fitted(meter: Meter, call: FormCall) -> tuple[Meter, dict[Phase, Reading]]:
    """The meter for the phases that its GPU can hold, and simulated readings of the others.

    All are tried where a meter takes no memory, and where a step cannot be simulated.
    """
    capacity = meter.capacity_bytes()
    if capacity is None:
        return meter, {}
    simulated, (*before, last) = get_meter("simulated"), call.phases
    try:
        readings = measure_phases(call, [last], simulated)
        if readings[last].total_bytes > capacity:  # train takes more than the phases before it
            readings |= measure_phases(call, before, simulated)
    except Exception:
        return meter, {}
    too_large = {phase: reading for phase, reading in readings.items() if reading.total_bytes > capacity}
    expected = max((reading.total_bytes for phase, reading in readings.items() if phase not in too_large), default=0)
    return meter.expecting(expected), {phase: too_large[phase] for phase in call.phases if phase in too_large}


# ---------------------------------------------------------------- several phases on the same inputs
_NEEDS_NO_WARM_UP: dict[tuple[str, Callable[..., object], str], bool] = {}


def _needs_no_warm_up(call: FormCall, meter: Simulation) -> bool:
    """Whether a first call takes exactly what a second takes, in every phase. Measured once, at a small shape."""
    contract = call.contract
    smallest = min(contract.cases.values(), key=lambda case: math.prod(case.dims.values()))
    small = replace(call, draw=Draw(smallest)).shortened()
    key = (f"{contract.name} {small.draw.spelled()}", contract.function(call.form), meter.gpu.name)
    if key not in _NEEDS_NO_WARM_UP:
        rounds = _in_turn(small, call.phases, meter, rounds=2)
        _NEEDS_NO_WARM_UP[key] = rounds is not None and all(
            first == second and first.timeline == second.timeline
            for first, second in zip(rounds[0].values(), rounds[1].values(), strict=True)
        )
    return _NEEDS_NO_WARM_UP[key]


def _in_turn(
    call: FormCall, phases: Sequence[Phase], meter: Simulation, *, rounds: int = 1
) -> list[dict[Phase, Reading]] | None:
    """Readings by phase, one dictionary for each round, all on the same inputs.

    None where a phase cannot be measured; measuring each phase alone then shows which one, and why.
    """
    run = [phase for phase in phases if phase != "held" or "train" not in phases]
    try:
        readings = meter.measure_first_calls(StepsOf(call.contract, call.form, call.draw, run * rounds))
    except Exception:
        return None
    by_round = [readings[first : first + len(run)] for first in range(0, len(readings), len(run))]
    return [_with_held(dict(zip(run, some, strict=True)), phases) for some in by_round]


def _with_held(readings: dict[Phase, Reading], phases: Sequence[Phase]) -> dict[Phase, Reading]:
    """Readings in the order of ``phases``. ``held`` comes from the train step, which marks the end of its forward."""
    found: dict[Phase, Reading] = dict(readings)
    train = readings.get("train")
    if train is not None:
        assert train.timeline is not None
        ((held_until, _),) = train.timeline.stages
        found["train"] = replace(train, stages=(), timeline=replace(train.timeline, stages=()))
        found["held"] = _held_in(train, train.timeline.before(held_until), readings.get("forward"))
    return {phase: found[phase] for phase in phases}


def _held_in(train: Reading, until_held: Timeline, forward: Reading | None) -> Reading:
    """The train step's reading up to the end of its forward, with the inputs of ``forward``: no upstream gradient."""
    if forward is not None and forward.timeline is not None:
        inputs = tuple(buffer for buffer in forward.timeline.buffers if not buffer.born)
        made = tuple(buffer for buffer in until_held.buffers if buffer.born)
        until_held = replace(until_held, buffers=inputs + made)
    allocated = until_held.with_sizes(rounded)
    return replace(
        train,
        base_bytes=until_held.base_bytes,
        peak_bytes=max(until_held.live_bytes) - until_held.base_bytes,
        held_bytes=until_held.live_bytes[-1] - until_held.base_bytes,
        allocated_bytes=max(allocated.live_bytes) - allocated.base_bytes,
        alive_at_peak=until_held.at_peak(),
        stages=(),
        timeline=until_held,
    )
