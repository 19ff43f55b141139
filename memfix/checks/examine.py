"""Every check of one contract, in order: equal first; small only where equal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..contract import Contract
from ..errors import MemfixError
from ..laws import NAIVE, Phase
from ..meters.base import Meter, Reading
from .effort import Effort
from .finding import Finding

if TYPE_CHECKING:
    from .inputs import Draw

Say = Callable[[str], None]
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
    device: str = "cpu",
    random: bool = False,
) -> Examination:
    """Every check but speed, of ``forms`` or all; equality on ``device``. ``say`` is told what is under way."""
    from .bad_inputs import check_bad_input
    from .equality import check_equality

    chosen = tuple(contract.forms) if forms is None else tuple(forms)
    findings: list[Finding] = []
    known_unequal = frozenset(chosen) & set(contract.known_unequal_forms())
    unequal: set[str] = set(known_unequal)
    for form in chosen:
        for dtype in contract.dtypes:
            say(f"{contract.name}/{form}: equality in {dtype}")
            found = check_equality(
                contract, form, dtype=dtype, device=device, examples=effort.equality_examples, random=random
            )
            findings.append(found)
            if found.status != "pass":
                unequal.add(form)
                break  # one shrunken failure says it; the other dtypes would say it again
        findings.extend(check_bad_input(contract, form, bad) for bad in contract.bad_inputs)
    equal = [form for form in chosen if form not in unequal]
    readings = _readings(contract, (NAIVE, *equal), meter, findings, say)
    for form in chosen:
        if form in unequal:
            known = "known to be not" if form in known_unequal else "not"
            message = f"memory not judged: the form is {known} equal to naive"
            findings.append(Finding("budget", contract.name, form, "note", message))
        else:
            findings.extend(_memory_findings(contract, form, readings, meter, effort, say))
    return Examination(contract.name, (NAIVE, *chosen), tuple(findings), readings, frozenset(equal), known_unequal)


def examine_call(contract: Contract, draw: Draw, meter: Meter, *, forms: Sequence[str], device: str) -> list[Finding]:
    """Equality and every budget without a case, at one call."""
    from .equality import check_equality_at
    from .memory import measure_and_judge

    findings = []
    for form in forms:
        findings.append(check_equality_at(contract, form, draw, device=device))
        budgets = contract.budgets_of(form, draw.case.name)
        findings += [measure_and_judge(contract, budget, draw, meter) for budget in budgets]
    return findings


def _readings(
    contract: Contract, forms: Sequence[str], meter: Meter, findings: list[Finding], say: Say
) -> dict[Where, Reading]:
    from .inputs import Draw, phases_of
    from .memory import measure

    readings: dict[Where, Reading] = {}
    for form in forms:
        for case in contract.cases.values():
            for phase in phases_of(contract):
                say(f"{contract.name}/{form}: memory at {case.name}, {phase}")
                try:
                    readings[form, case.name, phase] = measure(contract, form, Draw(case), phase, meter)
                except Exception as error:
                    what = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
                    message = f"could not be measured, meter {meter.name}: {what}"
                    findings.append(Finding("memory", contract.name, form, "error", message, case.name, phase))
    return readings


def _memory_findings(
    contract: Contract,
    form: str,
    readings: dict[Where, Reading],
    meter: Meter,
    effort: Effort,
    say: Say,
) -> list[Finding]:
    from .memory import check_drawn_budgets, forms_needed, judge_budget, judge_leak
    from .scaling import check_scaling

    findings: list[Finding | None] = []
    for case in contract.cases.values():
        here = {(f, phase): reading for (f, c, phase), reading in readings.items() if c == case.name}
        findings += [
            judge_budget(contract, budget, case, here)
            for budget in contract.budgets_of(form, case.name)
            if all((f, budget.phase) in here for f in forms_needed(budget))
        ]
        findings += [judge_leak(contract, f, case, phase, reading) for (f, phase), reading in here.items() if f == form]
    if meter.name == "simulated":  # a real GPU need not hold what nobody chose
        say(f"{contract.name}/{form}: budgets at drawn shapes")
        findings.append(check_drawn_budgets(contract, form, meter, examples=effort.memory_examples))
        for law in contract.scaling:
            if law.form == form:
                say(f"{contract.name}/{form}: growth with {law.dim}")
                findings.append(check_scaling(contract, law, meter))
    return [finding for finding in findings if finding is not None]
