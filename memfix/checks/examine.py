"""Every check of one contract: run the plan, and put what was found together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Contract
from ..laws import NAIVE, Phase
from ..meters.base import Meter, Reading
from .effort import Effort
from .finding import Finding
from .outcome import OneMeter, Say, run_checks
from .plan import LAWS, Check, Found, gate_plan, meter_of, no_memory_passes, place_of, standing_of

if TYPE_CHECKING:
    from .inputs import Draw

Where = tuple[str, str, Phase]
"""Form, case, phase."""


@dataclass(frozen=True)
class Examination:
    """All that was found out about one op."""

    op: str
    forms: tuple[str, ...]
    findings: tuple[Finding, ...]
    readings: dict[Where, Reading]
    equal_forms: frozenset[str]
    known_unequal_forms: frozenset[str] = frozenset()


def examine(
    contract: Contract,
    meter: Meter,
    effort: Effort,
    say: Say = lambda _: None,
    *,
    forms: Sequence[str] | None = None,
    device: str | None = None,
) -> Examination:
    """Every check but speed, of ``forms`` or all, in this process. ``say`` is told what is under way."""
    plan = gate_plan(contract, meter, forms=forms, device=device)
    found = run_checks(contract, plan, OneMeter(meter, effort), {}, say)
    return put_together(contract, plan, found)


def examine_call(
    contract: Contract, draw: Draw, meter: Meter, *, forms: Sequence[str], device: str
) -> Iterator[Finding]:
    """Equality and every budget without a case, at one call. Of a form that is unequal there no budget passes."""
    from .equality import check_equality_at
    from .memory import measure_and_judge

    meter = meter_of(contract, meter)
    for form in forms:
        equality = check_equality_at(contract, form, draw, place=place_of(contract, form, device))
        yield equality
        is_wrong = equality.status != "pass"
        if is_wrong:
            yield no_memory_passes(contract, form, equality)
        if meter.simulation is not None or not is_wrong:
            judged = measure_and_judge(contract, contract.budgets_of(form, draw.case.name), draw, meter)
            yield from (finding for finding in judged if not is_wrong or finding.status == "fail")


def put_together(contract: Contract, plan: Sequence[Check], found: Found) -> Examination:
    """One examination of what the checks of ``plan`` found. No memory of a form that is not equal can pass; where it
    fails, that is said too: one and the same line may have made it wrong and large.
    """
    forms = tuple(dict.fromkeys(check.form for check in plan if check.kind == "equality"))
    standings = {form: standing_of(contract, form, found) for form in forms}
    equal = [form for form, standing in standings.items() if standing.no_memory is None]
    findings: list[Finding] = []
    for form, standing in standings.items():
        findings += [*standing.equality, *_told(plan, found, form, "bad input")]
    for form in (NAIVE, *equal):
        findings += _told(plan, found, form, "memory")
    readings = {
        (check.form, check.case, phase): reading
        for check in plan
        if check in found
        for phase, reading in found[check].readings.items()
    }
    for form, standing in standings.items():
        trusted = {place: reading for place, reading in readings.items() if place[0] in (NAIVE, form, *equal)}
        judged = [*_judged_cases(contract, form, trusted), *_told(plan, found, form, *LAWS)]
        if standing.no_memory is not None:
            judged = [standing.no_memory, *(finding for finding in judged if finding.status == "fail")]
        findings += judged
    known_unequal = frozenset(form for form in forms if contract.forms[form].known_unequal)
    return Examination(contract.name, (NAIVE, *forms), tuple(findings), readings, frozenset(equal), known_unequal)


def _told(plan: Sequence[Check], found: Found, form: str, *kinds: str) -> Iterator[Finding]:
    for check in plan:
        if check.form == form and check.kind in kinds and check in found:
            yield from found[check].findings


def _judged_cases(contract: Contract, form: str, readings: Mapping[Where, Reading]) -> Iterator[Finding]:
    for case in contract.cases:
        here = {(f, phase): reading for (f, c, phase), reading in readings.items() if c == case}
        yield from judge_case(contract, form, case, here)


def judge_case(
    contract: Contract, form: str, case: str, readings: Mapping[tuple[str, Phase], Reading]
) -> Iterator[Finding]:
    """Budgets, leaks and what is kept for good of one form at one case. A budget is judged where all that it compares
    was measured."""
    from .memory import forms_needed, judge_budget, judge_kept, judge_leak

    at = contract.cases[case]
    for budget in contract.budgets_of(form, case):
        if all((f, budget.phase) in readings for f in forms_needed(budget)):
            yield judge_budget(contract, budget, at, readings)
    own = [(phase, reading) for (f, phase), reading in readings.items() if f == form]
    leaks = (judge_leak(contract, form, at, phase, reading) for phase, reading in own)
    yield from (finding for finding in (*leaks, judge_kept(contract, form, at, readings)) if finding is not None)
