"""Small: measure every form at every case, and compare the readings with the budgets."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..contract import Case, Contract
from ..laws import Budget, Phase
from ..meters import get_meter
from ..meters.base import Meter, Reading, Simulation
from ..meters.simulated.ledger import rounded
from ..meters.timeline import Timeline
from ..units import format_bytes, format_change
from .finding import Finding, Status
from .measured import Bytes

if TYPE_CHECKING:
    from .inputs import Draw

Readings = Mapping[tuple[str, Phase], Reading]
"""The readings of one op at one case, by form and phase."""


def bytes_of(reading: Reading, phase: Phase) -> int:
    """The bytes that a phase is judged by: what is held after the forward, or the peak."""
    return reading.held_bytes if phase == "held" else reading.peak_bytes


def measure(contract: Contract, form: str, draw: Draw, phase: Phase, meter: Meter) -> Reading:
    """Measure one form at one draw in one phase."""
    from .inputs import StepOf

    return meter.measure(StepOf(contract, form, draw, phase))


def measure_phases(
    contract: Contract, form: str, draw: Draw, phases: Collection[Phase], meter: Meter
) -> dict[Phase, Reading]:
    """Measure one form at one draw in several phases, which may include ``saved`` and ``kept``.

    The simulated meter runs the phases one after the other on the same inputs, without warm-ups, if the form needs none
    and leaks nothing.
    """
    from .inputs import phases_of
    from .saved import of_what_is_saved

    in_order = [phase for phase in _IN_TURN if phase in phases]
    if phases and not in_order:
        in_order = [phases_of(contract)[-1]]
    readings: dict[Phase, Reading] = {}
    simulation = meter.simulation
    if simulation is not None and _needs_no_warm_up(contract, form, simulation):
        (readings,) = _in_turn(contract, form, draw, in_order, simulation) or ({},)
    if not readings or any(reading.leaked_bytes for reading in readings.values()):
        readings = {phase: measure(contract, form, draw, phase, meter) for phase in in_order}
    if "kept" in phases:
        of_kept = [reading.of_what_is_kept() for reading in readings.values()]
        # the first of equal ones: it was made in this simulation, so its line is known
        readings["kept"] = max(of_kept, key=lambda reading: reading.peak_bytes)
    if "saved" in phases:
        readings["saved"] = of_what_is_saved(contract, form, draw, like=next(iter(readings.values())))
    return readings


_IN_TURN: tuple[Phase, ...] = ("forward", "held", "train")


def _in_turn(
    contract: Contract, form: str, draw: Draw, phases: Sequence[Phase], meter: Simulation, *, rounds: int = 1
) -> list[dict[Phase, Reading]] | None:
    """Readings by phase, one dictionary for each round, all on the same inputs.

    None where a phase cannot be measured; measuring each phase alone then shows which one, and why.
    """
    from .inputs import StepsOf

    run = [phase for phase in phases if phase != "held" or "train" not in phases]
    try:
        readings = meter.measure_first_calls(StepsOf(contract, form, draw, run * rounds))
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


_NEEDS_NO_WARM_UP: dict[tuple[str, Callable[..., object], str], bool] = {}


def _needs_no_warm_up(contract: Contract, form: str, meter: Simulation) -> bool:
    """Whether a first call takes exactly what a second takes, in every phase. Measured once, at a small shape."""
    from .inputs import Draw, phases_of
    from .saved import short_case

    smallest = min(contract.cases.values(), key=lambda case: math.prod(case.dims.values()))
    draw = Draw(short_case(contract, smallest))
    key = (f"{contract.name} {draw.spelled()}", contract.function(form), meter.gpu.name)
    if key not in _NEEDS_NO_WARM_UP:
        rounds = _in_turn(contract, form, draw, phases_of(contract), meter, rounds=2)
        _NEEDS_NO_WARM_UP[key] = rounds is not None and all(
            first == second and first.timeline == second.timeline
            for first, second in zip(rounds[0].values(), rounds[1].values(), strict=True)
        )
    return _NEEDS_NO_WARM_UP[key]


def too_large_for(
    meter: Meter, contract: Contract, form: str, draw: Draw, phases: Sequence[Phase]
) -> dict[Phase, Reading]:
    """Simulated readings of the phases that the meter's GPU cannot hold.

    Empty where a meter takes no memory, and where a step cannot be simulated: then the step is tried.
    """
    capacity = meter.capacity_bytes()
    if capacity is None:
        return {}
    simulated = get_meter("simulated")
    try:
        largest = measure_phases(contract, form, draw, phases[-1:], simulated)
        if _all_bytes(largest[phases[-1]]) <= capacity:  # train takes more than the phases before it
            return {}
        every = measure_phases(contract, form, draw, phases[:-1], simulated) | largest
    except Exception:
        return {}
    return {phase: reading for phase, reading in every.items() if _all_bytes(reading) > capacity}


def _all_bytes(reading: Reading) -> int:
    return reading.base_bytes + reading.peak_bytes


def limit_of(budget: Budget, case: Case, readings: Readings) -> int:
    """The budget's limit at this case, in bytes."""
    if budget.formula is not None:
        return budget.formula.evaluate(case.formula_values)
    reference, factor = budget.reference, budget.factor
    assert reference is not None
    assert factor is not None
    return int(bytes_of(readings[reference, budget.phase], budget.phase) / factor)


def forms_needed(budget: Budget) -> list[str]:
    """The forms that must be measured to judge a budget."""
    return [budget.form, *([budget.reference] if budget.reference else [])]


def judge_budget(contract: Contract, budget: Budget, case: Case, readings: Readings) -> Finding:
    """Is the form within its budget? A reported form whose budget is known to be broken must exceed it."""
    reading = readings[budget.form, budget.phase]
    used, limit = bytes_of(reading, budget.phase), limit_of(budget, case, readings)
    within = used < limit + reading.granularity_bytes  # the meter cannot tell smaller differences
    name = budget.phase if budget.phase in ("held", "saved", "kept") else "peak"
    ratio = f" ({budget.factor:g}x below {budget.reference})" if budget.reference else ""
    if within:
        outcome = " (a reported form suddenly passes)" if budget.known_broken else ""
    else:
        outcome = f" ({'known broken, ' if budget.known_broken else ''}{format_change(used, limit)})"
    message = f"{name} {format_bytes(used)}, budget {format_bytes(limit)}{ratio}{outcome}, meter {reading.meter}"
    status: Status = "pass" if within != budget.known_broken else "fail"
    return Finding(
        "budget", contract.name, budget.form, status, message, case.name, budget.phase,
        details=() if within or budget.known_broken else explained(reading, budget.phase),
        measured=Bytes(used, limit, "budget"), known="breaks its budget" if budget.known_broken and not within else "",
    )  # fmt: skip


def measure_and_judge(contract: Contract, budgets: Sequence[Budget], draw: Draw, meter: Meter) -> list[Finding]:
    """Measure at one draw what ``budgets`` need, and judge them."""
    readings = readings_for(contract, budgets, draw, meter)
    return [judge_budget(contract, budget, draw.case, readings) for budget in budgets]


def readings_for(
    contract: Contract,
    budgets: Sequence[Budget],
    draw: Draw,
    meter: Meter,
    *,
    also: Collection[tuple[str, Phase]] = (),
) -> Readings:
    """Measure at one draw what ``budgets`` need, and ``also`` these forms in these phases."""
    needed: dict[str, set[Phase]] = {}
    for form, phase in (*also, *((f, budget.phase) for budget in budgets for f in forms_needed(budget))):
        needed.setdefault(form, set()).add(phase)
    return {
        (form, phase): reading
        for form, phases in needed.items()
        for phase, reading in measure_phases(contract, form, draw, phases, meter).items()
    }


def judge_leak(contract: Contract, form: str, case: Case, phase: Phase, reading: Reading) -> Finding | None:
    """Bytes that stay after the result is dropped are a leak: the next call adds as many."""
    if reading.leaked_bytes < reading.granularity_bytes:
        return None
    leaked = format_bytes(reading.leaked_bytes)
    message = f"leaks {leaked} per call: alive after the result was dropped, meter {reading.meter}"
    return Finding("leak", contract.name, form, "fail", message, case.name, phase, explained(reading, phase))


def judge_kept(contract: Contract, form: str, case: Case, readings: Readings) -> Finding | None:
    """What a first call keeps for good must have a budget: no later call shows it."""
    reading = readings.get((form, "kept"))
    allowed = [budget for budget in contract.budgets_of(form, case.name) if budget.phase == "kept"]
    if reading is None or not reading.peak_bytes or allowed:
        return None
    size = format_bytes(reading.peak_bytes)
    message = f"keeps {size} for good after a first call, which no budget of the phase kept allows"
    return Finding(
        "kept", contract.name, form, "fail", message, case.name, "kept", explained(reading, "kept"),
        measured=Bytes(reading.peak_bytes, 0, "budget"),
    )  # fmt: skip


def explained(reading: Reading, phase: str) -> tuple[str, ...]:
    """The largest allocations behind a phase's bytes, for the lines below a failure."""
    if phase == "held" and reading.timeline is not None:
        timeline = reading.timeline
        reading = replace(reading, alive_at_peak=timeline.rows_at(timeline.num_events))
    if not reading.alive_at_peak:
        return ()
    title = _TITLES.get(phase, "alive at the peak")
    lines = (f"  {title}, largest first", *(f"  {line}" for line in reading.table_lines(6)))
    return (*lines, f"  likely cause: {reading.hint}") if reading.hint else lines


_TITLES = {
    "held": "held when the forward has ended",
    "saved": "inputs that are kept for backward",
    "kept": "kept for good",
}


def check_drawn_budgets(contract: Contract, form: str, meter: Meter, *, examples: int) -> Finding | None:
    """Judge the budgets without a case, and leaks, at drawn shapes and options. None where the form has no such
    budget."""
    from .draws import memory_calls, smallest_failure

    budgets = [b for b in contract.budgets if b.form == form and b.case is None and not b.known_broken]
    if not budgets:
        return None

    events_left, measured = _ENOUGH_EVENTS, 0

    def within(draw: Draw, budgets: Sequence[Budget] = budgets) -> None:
        nonlocal events_left, measured
        if events_left <= 0:
            return
        measured += 1
        readings = readings_for(contract, budgets, draw, meter)
        events_left -= sum(reading.timeline.num_events for reading in readings.values() if reading.timeline is not None)
        judged = [judge_budget(contract, budget, draw.case, readings) for budget in budgets]
        judged += [
            leak
            for (f, phase), reading in readings.items()
            if (leak := judge_leak(contract, f, draw.case, phase, reading))
        ]
        for finding in judged:
            if finding.status == "fail":
                events_left = _ENOUGH_EVENTS  # as many again to find the smallest shape
                raise _OverBudget(finding)

    calls = sorted(memory_calls(contract, examples), key=lambda call: math.prod(call.draw.case.dims.values()))
    failure = smallest_failure(within, calls, shrinks=0)
    if failure is not None:
        for budget in budgets:  # find the budget that breaks, and the smallest shape that breaks it
            alone = smallest_failure(partial(within, budgets=[budget]), calls, shrinks=25)
            if alone is not None:
                return _failed_at(contract, form, budget, *alone)
        return _failed_at(contract, form, budgets[0], *failure)
    laws = f"{len(budgets)} budget{'s' if len(budgets) > 1 else ''}"
    return Finding("budget", contract.name, form, "pass", f"{laws} held at {measured} drawn shapes each", "drawn")


_ENOUGH_EVENTS = 6_000
"""The limit on simulated events for one form, small shapes first. A form with a loop over tokens can have as many
events at one large shape as at all others together."""


def _failed_at(contract: Contract, form: str, budget: Budget, draw: Draw, error: Exception) -> Finding:
    if not isinstance(error, _OverBudget):
        message = f"cannot be measured at {draw.spelled()}: {type(error).__name__}: {error}"
        return Finding("budget", contract.name, form, "error", message, "drawn", budget.phase)
    return replace(
        error.finding,
        message=f"{error.finding.message} at {draw.spelled()}",
        reproduce=f"memfix check {contract.name} --form {form} --at {draw.spelled()}",
    )


class _OverBudget(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding
