"""Measure and judge budgets beyond the cases: at one given call, and at drawn shapes and options."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from ..contract import Contract
from ..laws import Budget, Phase
from ..meters.base import Meter
from .draws import memory_calls, smallest_failure
from .finding import Finding
from .form_call import FormCall
from .inputs import Draw
from .measuring import measure_phases
from .memory import Readings, forms_needed, judge_budget, judge_leak


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


def check_drawn_budgets(contract: Contract, form: str, meter: Meter, *, examples: int) -> Iterator[Finding]:
    """Judge the budgets without a case, and leaks, at drawn shapes and options. A form without such a budget gives an
    error if the contract has others, unless it is reported."""
    budgets = [b for b in contract.budgets if b.form == form and b.case is None and not b.known_broken]
    if not budgets:
        if contract.budgets and not contract.forms[form].reported:
            message = "no budget holds at every shape, so what it takes beyond the cases may grow"
            yield Finding("budget", contract.name, form, "error", f"{message}: add one without a case")
        return
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
    failure, broken = smallest_failure(within, calls, shrinks=0), budgets[0]
    if failure is None:
        laws = f"{len(budgets)} budget{'s' if len(budgets) > 1 else ''}"
        yield Finding("budget", contract.name, form, "pass", f"{laws} held at {measured} drawn shapes each", "drawn")
        return
    for budget in budgets:  # find the budget that breaks, and the smallest shape that breaks it
        alone = smallest_failure(partial(within, budgets=[budget]), calls, shrinks=25)
        if alone is not None:
            failure, broken = alone, budget
            break
    draw, error = failure
    yield _failed_at(FormCall(contract, form, draw), broken, error)


_ENOUGH_EVENTS = 6_000
"""The limit on simulated events for one form, small shapes first. A form with a loop over tokens can have as many
events at one large shape as at all others together."""
_ENOUGH_SECONDS = 5.0
"""The limit for a meter that really runs the steps: at a size near the incident's, a step of a slow form takes half
a minute."""


def _failed_at(call: FormCall, budget: Budget, error: Exception) -> Finding:
    at = call.draw.spelled()
    if not isinstance(error, _OverBudget):
        message = f"cannot be measured at {at}: {type(error).__name__}: {error}"
        return call.finding("budget", "error", message, budget.phase)
    return replace(error.finding, message=f"{error.finding.message} at {at}", reproduce=call.command)


class _OverBudget(Exception):
    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding
