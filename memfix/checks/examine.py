"""Examine one contract: run its plan of checks, and put their findings together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Contract
from ..laws import NAIVE, Phase
from ..meters.base import Meter, Reading
from .effort import Effort
from .finding import Finding
from .plan import (
    LAWS,
    Check,
    Found,
    OneMeter,
    Say,
    gate_plan,
    meter_of,
    no_memory_passes,
    place_of,
    run_checks,
    standing_of,
)

if TYPE_CHECKING:
    from .inputs import Draw

Where = tuple[str, str, Phase]
"""Form, case, phase."""


@dataclass(frozen=True)
class Examination:
    """Everything that the checks found about one op."""

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
    """Run every check of ``forms``, or of all, but speed, in this process. ``say`` gets progress messages."""
    plan = gate_plan(contract, meter, forms=forms, device=device)
    found = run_checks(contract, plan, OneMeter(meter, effort), {}, say)
    return put_together(contract, plan, found)


def examine_call(
    contract: Contract, draw: Draw, meter: Meter, *, forms: Sequence[str], device: str
) -> Iterator[Finding]:
    """Check equality and every budget without a case at one call. No budget passes for a form that is unequal there."""
    from .drawn_budgets import measure_and_judge
    from .equality import check_equality_at
    from .form_call import FormCall

    meter = meter_of(contract, meter)
    for form in forms:
        equality = check_equality_at(contract, form, draw, place=place_of(contract, form, device))
        yield equality
        is_wrong = equality.status != "pass"
        if is_wrong:
            yield no_memory_passes(contract, form, equality)
        if meter.simulation is not None or not is_wrong:
            call, budgets = FormCall(contract, form, draw), contract.budgets_of(form, draw.case.name)
            judged = measure_and_judge(call, budgets, meter)
            yield from (finding for finding in judged if not is_wrong or finding.status == "fail")


def put_together(contract: Contract, plan: Sequence[Check], found: Found) -> Examination:
    """Make one examination of what the checks of ``plan`` found. No memory check of an unequal form can pass; its
    failures are kept, since one and the same line may have made it wrong and large.
    """
    from .form_call import FormCall
    from .memory import judge_case

    forms = tuple(dict.fromkeys(check.form for check in plan if check.kind == "equality"))
    standings = {form: standing_of(contract, form, found) for form in forms}
    equal = [form for form, standing in standings.items() if standing.no_memory is None]
    told: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    readings: dict[Where, Reading] = {}
    for check in plan:
        if check in found:
            told[check.form, "law" if check.kind in LAWS else check.kind] += found[check].findings
            readings |= {(check.form, check.case, phase): r for phase, r in found[check].readings.items()}
    findings: list[Finding] = []
    for form, standing in standings.items():
        findings += [*standing.equality, *told[form, "bad input"]]
    for form in (NAIVE, *equal):
        findings += told[form, "memory"]
    for form, standing in standings.items():
        judged: list[Finding] = []
        for case in contract.cases:
            trusted = {(f, p): r for (f, c, p), r in readings.items() if c == case and f in (NAIVE, form, *equal)}
            judged += judge_case(FormCall.at_case(contract, form, case), trusted)
        judged += told[form, "law"]
        if standing.no_memory is not None:
            judged = [standing.no_memory, *(finding for finding in judged if finding.status == "fail")]
        findings += judged
    known_unequal = frozenset(form for form in forms if contract.forms[form].known_unequal)
    return Examination(contract.name, (NAIVE, *forms), tuple(findings), readings, frozenset(equal), known_unequal)
