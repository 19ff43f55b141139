"""Judge readings: the bytes of each phase against its budgets, leaks, and what is kept for good. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ..contract.case import is_variant
from ..laws import Budget, Phase
from ..meters import get_meter
from ..meters.base import Reading
from ..units import format_bytes, format_change
from .finding import Finding, Status
from .measured import Bytes

if TYPE_CHECKING:
    from .form_call import FormCall

Readings = Mapping[tuple[str, Phase], Reading]
"""The readings of one op at one case, by form and phase."""
_SMALL_SHARE = 0.01
"""An excess below this share of the peak is not explained by what is largest there."""


def judge_case(call: FormCall, readings: Readings) -> Iterator[Finding]:
    """Judge budgets, leaks and what is kept for good. A budget is judged where all that it compares was measured; one
    that is known to be broken need not be so in every variant."""
    case = call.draw.case.name
    for budget in call.contract.budgets_of(call.form, case):
        is_measured = all((form, budget.phase) in readings for form in forms_needed(budget))
        if is_measured and not (budget.known_broken and is_variant(case)):
            yield judge_budget(call, budget, readings)
    leaks = (judge_leak(call, phase, reading) for (form, phase), reading in readings.items() if form == call.form)
    yield from (finding for finding in (*leaks, judge_kept(call, readings)) if finding is not None)


def forms_needed(budget: Budget) -> list[str]:
    """The forms that must be measured to judge a budget."""
    return [budget.form, *([budget.reference] if budget.reference else [])]


def judge_budget(call: FormCall, budget: Budget, readings: Readings) -> Finding:
    """Judge one budget. A reported form whose budget is known to be broken must exceed it."""
    reading = readings[budget.form, budget.phase]
    used, limit = bytes_of(reading, budget.phase), limit_of(call, budget, readings)
    within = used < limit + reading.granularity_bytes  # the meter cannot tell smaller differences
    name = budget.phase if budget.phase in ("held", "saved", "results", "kept") else "peak"
    ratio = f" ({budget.factor:g}x below {budget.reference})" if budget.reference else ""
    if within:
        outcome = " (a reported form suddenly passes)" if budget.known_broken else ""
    else:
        outcome = f" ({'known broken, ' if budget.known_broken else ''}{format_change(used, limit)})"
    message = f"{name} {format_bytes(used)}, budget {format_bytes(limit)}{ratio}{outcome}, meter {reading.meter}"
    status: Status = "pass" if within != budget.known_broken else "fail"
    return call.finding(
        "budget", status, message, budget.phase,
        details=() if within or budget.known_broken else _explained(call, budget.phase, reading, used - limit),
        measured=Bytes(used, limit, "budget"), known="breaks its budget" if budget.known_broken and not within else "",
    )  # fmt: skip


def limit_of(call: FormCall, budget: Budget, readings: Readings) -> int:
    if budget.formula is not None:
        return budget.formula.evaluate(call.contract.formula_values(call.draw.case))
    reference, factor = budget.reference, budget.factor
    assert reference is not None
    assert factor is not None
    return int(bytes_of(readings[reference, budget.phase], budget.phase) / factor)


def bytes_of(reading: Reading, phase: Phase) -> int:
    """Return the bytes that a phase is judged by: those held after the forward, or the highest possible peak."""
    return reading.held_bytes if phase == "held" else reading.highest_bytes


def judge_leak(call: FormCall, phase: Phase, reading: Reading) -> Finding | None:
    """Fail a form that leaks: bytes stay after the result is dropped, and the next call adds as many. Python's cycle
    collector may free them, but it counts objects, not bytes: many calls can run out of memory before it runs."""
    if reading.leaked_bytes >= reading.granularity_bytes:
        leaked, why = reading.leaked_bytes, "alive after the result was dropped"
    elif reading.cyclic_bytes >= reading.granularity_bytes:
        leaked, why = reading.cyclic_bytes, "in a reference cycle, until Python's collector runs"
    else:
        return None
    message = f"leaks {format_bytes(leaked)} per call: {why}, meter {reading.meter}"
    return call.finding("leak", "fail", message, phase, details=_explained(call, phase, reading))


def judge_kept(call: FormCall, readings: Readings) -> Finding | None:
    """Fail bytes that a first call keeps for good without a budget: no later call shows them."""
    reading = readings.get((call.form, "kept"))
    budgets = call.contract.budgets_of(call.form, call.draw.case.name)
    if reading is None or not reading.peak_bytes or any(budget.phase == "kept" for budget in budgets):
        return None
    used = bytes_of(reading, "kept")
    message = f"keeps {format_bytes(used)} for good after a first call, which no budget of the phase kept allows"
    measured = Bytes(used, 0, "budget")
    return call.finding("kept", "fail", message, "kept", details=explained(reading, "kept"), measured=measured)


# ---------------------------------------------------------------- what is behind the bytes
def _explained(call: FormCall, phase: Phase, reading: Reading, excess: int | None = None) -> tuple[str, ...]:
    return explained(with_lines(call, phase, reading), phase, excess)


def with_lines(call: FormCall, phase: Phase, reading: Reading) -> Reading:
    """Return the reading with source lines. The host meter finds them in a second measurement."""
    return get_meter("host").measure(call.step(phase)) if reading.meter == "host" else reading


def explained(reading: Reading, phase: str, excess: int | None = None) -> tuple[str, ...]:
    """Return the largest allocations behind a phase's bytes, as lines to print below a failure, and a likely cause if
    the ``excess`` is not small."""
    if phase == "held" and reading.timeline is not None:
        timeline = reading.timeline
        reading = replace(reading, alive_at_peak=timeline.rows_at(timeline.num_events))
    if not reading.alive_at_peak:
        return ()
    title = _TITLES.get(phase, "alive at the peak")
    lines = (f"  {title}, largest first", *(f"  {line}" for line in reading.table_lines(6)))
    is_small = excess is not None and excess < _SMALL_SHARE * reading.peak_bytes
    return (*lines, f"  likely cause: {reading.hint}") if reading.hint and not is_small else lines


_TITLES = {
    "held": "held when the forward has ended",
    "saved": "inputs that are kept for backward",
    "results": "results that are kept for backward",
    "kept": "kept for good",
}
