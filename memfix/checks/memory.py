"""Small: compare readings with the budgets, at the cases and at drawn shapes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from ..contract import Contract
from ..laws import Budget, Phase
from ..meters.base import Meter, Reading
from ..units import format_bytes, format_change
from .draws import memory_calls, smallest_failure
from .finding import Finding, Status
from .form_call import FormCall
from .inputs import Draw
from .measured import Bytes
from .measuring import measure_phases, with_lines
from .phase_bytes import bytes_of, explained

Readings = Mapping[tuple[str, Phase], Reading]
"""The readings of one op at one case, by form and phase."""


def limit_of(call: FormCall, budget: Budget, readings: Readings) -> int:
    """The budget's limit at this case, in bytes."""
    if budget.formula is not None:
        return budget.formula.evaluate(call.contract.formula_values(call.draw.case))
    reference, factor = budget.reference, budget.factor
    assert reference is not None
    assert factor is not None
    return int(bytes_of(readings[reference, budget.phase], budget.phase) / factor)


def forms_needed(budget: Budget) -> list[str]:
    """The forms that must be measured to judge a budget."""
    return [budget.form, *([budget.reference] if budget.reference else [])]


def judge_case(call: FormCall, readings: Readings) -> Iterator[Finding]:
    """Judge budgets, leaks and what is kept for good. A budget is judged where all that it compares was measured."""
    for budget in call.contract.budgets_of(call.form, call.draw.case.name):
        if all((form, budget.phase) in readings for form in forms_needed(budget)):
            yield judge_budget(call, budget, readings)
    leaks = (judge_leak(call, phase, reading) for (form, phase), reading in readings.items() if form == call.form)
    yield from (finding for finding in (*leaks, judge_kept(call, readings)) if finding is not None)


def judge_budget(call: FormCall, budget: Budget, readings: Readings) -> Finding:
    """Is the form within its budget? A reported form whose budget is known to be broken must exceed it."""
    reading = readings[budget.form, budget.phase]
    used, limit = bytes_of(reading, budget.phase), limit_of(call, budget, readings)
    within = used < limit + reading.granularity_bytes  # the meter cannot tell smaller differences
    name = budget.phase if budget.phase in ("held", "saved", "kept") else "peak"
    ratio = f" ({budget.factor:g}x below {budget.reference})" if budget.reference else ""
    if within:
        outcome = " (a reported form suddenly passes)" if budget.known_broken else ""
    else:
        outcome = f" ({'known broken, ' if budget.known_broken else ''}{format_change(used, limit)})"
    message = f"{name} {format_bytes(used)}, budget {format_bytes(limit)}{ratio}{outcome}, meter {reading.meter}"
    status: Status = "pass" if within != budget.known_broken else "fail"
    return call.finding(
        "budget", status, message, budget.phase,
        details=() if within or budget.known_broken else _explained(call, budget.phase, reading),
        measured=Bytes(used, limit, "budget"), known="breaks its budget" if budget.known_broken and not within else "",
    )  # fmt: skip


def measure_and_judge(call: FormCall, budgets: Sequence[Budget], meter: Meter) -> list[Finding]:
    """Measure what ``budgets`` of this form need, and judge them."""
    readings = readings_for(call, budgets, meter)
    return [judge_budget(call, budget, readings) for budget in budgets]


def readings_for(call: FormCall, budgets: Sequence[Budget], meter: Meter) -> Readings:
    """Measure what ``budgets`` need: this form, and those that it is compared with."""
    needed: dict[str, set[Phase]] = {}
    for form, phase in ((f, budget.phase) for budget in budgets for f in forms_needed(budget)):
        needed.setdefault(form, set()).add(phase)
    return {
        (form, phase): reading
        for form, phases in needed.items()
        for phase, reading in measure_phases(call.of(form), phases, meter).items()
    }


def judge_leak(call: FormCall, phase: Phase, reading: Reading) -> Finding | None:
    """Bytes that stay after the result is dropped are a leak: the next call adds as many."""
    if reading.leaked_bytes < reading.granularity_bytes:
        return None
    leaked = format_bytes(reading.leaked_bytes)
    message = f"leaks {leaked} per call: alive after the result was dropped, meter {reading.meter}"
    return call.finding("leak", "fail", message, phase, details=_explained(call, phase, reading))


def _explained(call: FormCall, phase: Phase, reading: Reading) -> tuple[str, ...]:
    return explained(with_lines(call, phase, reading), phase)


def judge_kept(call: FormCall, readings: Readings) -> Finding | None:
    """What a first call keeps for good must have a budget: no later call shows it."""
    reading = readings.get((call.form, "kept"))
    budgets = call.contract.budgets_of(call.form, call.draw.case.name)
    if reading is None or not reading.peak_bytes or any(budget.phase == "kept" for budget in budgets):
        return None
    used = bytes_of(reading, "kept")
    message = f"keeps {format_bytes(used)} for good after a first call, which no budget of the phase kept allows"
    measured = Bytes(used, 0, "budget")
    return call.finding("kept", "fail", message, "kept", details=explained(reading, "kept"), measured=measured)


def check_drawn_budgets(contract: Contract, form: str, meter: Meter, *, examples: int) -> Finding | None:
    """Judge the budgets without a case, and leaks, at drawn shapes and options. None where the form has no such
    budget."""
    budgets = [b for b in contract.budgets if b.form == form and b.case is None and not b.known_broken]
    if not budgets:
        return None

    events_left, measured, began = _ENOUGH_EVENTS, 0, time.monotonic()

    def within(draw: Draw, budgets: Sequence[Budget] = budgets) -> None:
        nonlocal events_left, measured
        if events_left <= 0 or (meter.simulation is None and time.monotonic() - began > _ENOUGH_SECONDS):
            return
        measured += 1
        call = FormCall(contract, form, draw)
        readings = readings_for(call, budgets, meter)
        events_left -= sum(reading.timeline.num_events for reading in readings.values() if reading.timeline is not None)
        judged = [judge_budget(call, budget, readings) for budget in budgets]
        leaks = (judge_leak(call.of(f), phase, reading) for (f, phase), reading in readings.items())
        for finding in (*judged, *leaks):
            if finding is not None and finding.status == "fail":
                events_left = _ENOUGH_EVENTS  # as many again to find the smallest shape
                raise _OverBudget(finding)

    calls = sorted(memory_calls(contract, examples), key=lambda call: math.prod(call.draw.case.dims.values()))
    failure = smallest_failure(within, calls, shrinks=0)
    if failure is not None:
        for budget in budgets:  # find the budget that breaks, and the smallest shape that breaks it
            alone = smallest_failure(partial(within, budgets=[budget]), calls, shrinks=25)
            if alone is not None:
                return _failed_at(FormCall(contract, form, alone[0]), budget, alone[1])
        return _failed_at(FormCall(contract, form, failure[0]), budgets[0], failure[1])
    laws = f"{len(budgets)} budget{'s' if len(budgets) > 1 else ''}"
    return Finding("budget", contract.name, form, "pass", f"{laws} held at {measured} drawn shapes each", "drawn")


_ENOUGH_EVENTS = 6_000
"""The limit on simulated events for one form, small shapes first. A form with a loop over tokens can have as many
events at one large shape as at all others together."""
_ENOUGH_SECONDS = 5.0
"""The limit for a meter that really runs the steps: near the incident a step of a slow form takes half a minute."""


def _failed_at(call: FormCall, budget: Budget, error: Exception) -> Finding:
    at = call.draw.spelled()
    if not isinstance(error, _OverBudget):
        message = f"cannot be measured at {at}: {type(error).__name__}: {error}"
        return call.finding("budget", "error", message, budget.phase)
    return replace(
        error.finding,
        message=f"{error.finding.message} at {at}",
        reproduce=f"memfix check {call.contract.name} --form {call.form} --at {at}",
    )


class _OverBudget(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding
