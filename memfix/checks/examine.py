"""Examine one contract: run its plan of checks, and put their findings together.

All who ask for checks share this: ``memfix gate``, its workers, ``memfix check``, ``memfix.suite``. Whoever runs only
some checks, or each in another process, collects their outcomes and puts them together at the end.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..contract import Contract
from ..errors import MemfixError, out_of_memory
from ..laws import NAIVE, Phase, Scaling, SpeedBudget
from ..meters import get_meter
from ..meters.base import Meter, Reading
from ..progress import Say, silent
from .children import one_core
from .effort import Effort
from .finding import Finding
from .plan import LAWS, MEASURED, Check, gate_plan, place_of, really_runs

if TYPE_CHECKING:
    from .inputs import Draw


@dataclass(frozen=True)
class Tools:
    """What checks run with: the chosen meter, how hard they look, and where their progress messages go."""

    meter: Meter
    effort: Effort
    say: Say = silent


@dataclass(frozen=True)
class Outcome:
    """What one check found. ``readings`` are those of a case, by phase."""

    findings: tuple[Finding, ...] = ()
    readings: Mapping[Phase, Reading] = field(default_factory=dict)


Found = dict[Check, Outcome]
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
    say: Say = silent,
    *,
    forms: Sequence[str] | None = None,
    device: str | None = None,
) -> Examination:
    """Run every check of ``forms``, or of all, but speed, in this process."""
    plan = gate_plan(contract, meter, forms=forms, device=device)
    found = run_checks(contract, plan, Tools(meter, effort, say), {})
    return put_together(contract, plan, found)


def examine_call(
    contract: Contract, draw: Draw, meter: Meter, *, forms: Sequence[str], device: str, say: Say = silent
) -> Iterator[Finding]:
    """Check equality and every budget without a case at one call. No budget passes for a form that is unequal there."""
    from .drawn_budgets import measure_and_judge
    from .equality import check_equality_at
    from .form_call import FormCall

    meter = meter_of(contract, meter)
    for form in forms:
        say(f"{contract.name}/{form}: naive and the form at this call; large sizes take minutes")
        equality = check_equality_at(contract, form, draw, place=place_of(contract, form, device))
        yield equality
        no_memory = None if equality.status == "pass" else no_memory_passes(contract, form, equality)
        judged: list[Finding] = []
        if meter.simulation is not None or no_memory is None:
            call, budgets = FormCall(contract, form, draw), contract.budgets_of(form, draw.case.name)
            say(f"{contract.name}/{form}: memory at this call")
            judged = measure_and_judge(call, budgets, meter)
        yield from unless_unequal(no_memory, judged)


# ---------------------------------------------------------------- running checks
def run_checks(contract: Contract, checks: Iterable[Check], tools: Tools, found: Found) -> Found:
    """Add to ``found`` the outcomes of those ``checks`` that are still due."""
    for check in checks:
        if is_due(check, contract, tools.meter, found):
            tools.say(str(check))
            found[check] = run_check(check, contract, tools)
    return found


def is_due(check: Check, contract: Contract, meter: Meter, found: Found) -> bool:
    """Whether a check is still needed after what was found."""
    if check.kind == "equality":
        return all(finding.status == "pass" for finding in standing_of(contract, check.form, found).equality)
    is_spared = check.kind == "memory" and check.form != NAIVE and really_runs(contract, meter)
    return not is_spared or standing_of(contract, check.form, found).no_memory is None


def run_check(check: Check, contract: Contract, tools: Tools) -> Outcome:
    """Run one check, all but a speed check on one core. A measurement that raises gives a finding, not an exception,
    as does a form that calls ``sys.exit``, which would end the gate."""
    try:
        with contextlib.nullcontext() if check.kind == "speed" else one_core():
            return _run_check(check, contract, tools)
    except SystemExit as error:
        message = f"it called sys.exit({error.code!r})"
        return Outcome((Finding(check.kind, contract.name, check.form, "fail", message, check.case or None),))


def _run_check(check: Check, contract: Contract, tools: Tools) -> Outcome:
    meter = meter_of(contract, tools.meter, simulates=check.kind in (*LAWS, "agreement"))
    if check.kind in MEASURED:
        return _measured_case(check, contract, meter)
    try:
        return Outcome(tuple(_findings(check, contract, meter, tools.effort)))
    except Exception as error:
        if check.kind not in LAWS:
            raise
        message, phase = _not_measured(meter, error), check.law.phase if check.law else None
        return Outcome((Finding(check.kind, contract.name, check.form, "error", message, check.case or None, phase),))


def _measured_case(check: Check, contract: Contract, meter: Meter) -> Outcome:
    from .form_call import FormCall
    from .measuring import measure_case

    call = FormCall.at_case(contract, check.form, check.case)
    readings, errors = measure_case(call, meter)
    findings = (call.finding("memory", "error", _not_measured(meter, e), phase) for phase, e in errors.items())
    return Outcome(tuple(findings), readings)


def _not_measured(meter: Meter, error: Exception) -> str:
    """The message of a finding about a measurement that raised ``error``."""
    what = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":
        what = out_of_memory(error)
    return f"could not be measured, meter {meter.name}: {what}"


def _findings(check: Check, contract: Contract, meter: Meter, effort: Effort) -> Iterator[Finding]:
    form = check.form
    if check.kind == "equality":
        from .equality import check_equality

        yield check_equality(
            contract, form, dtype=check.dtype, place=check.place,
            examples=effort.equality_examples, seed=effort.seed, shrinks=effort.shrinks,
        )  # fmt: skip
    elif check.kind == "bad input":
        from .bad_inputs import check_bad_input

        (bad,) = (bad for bad in contract.bad_inputs if bad.name == check.bad_input)
        yield check_bad_input(contract, form, bad)
    elif check.kind == "compile":
        from .compiling import check_compiles

        yield check_compiles(contract, form, meter)
    elif isinstance(check.law, Scaling):
        from .scaling import check_scaling

        yield check_scaling(contract, check.law, meter)
    elif isinstance(check.law, SpeedBudget):
        from .speed import check_speed

        yield check_speed(contract, check.law)
    elif check.kind == "agreement":
        from .agreement import check_agreement
        from .form_call import FormCall

        yield from check_agreement(FormCall.at_case(contract, form, check.case), meter)
    else:
        from .drawn_budgets import check_drawn_budgets

        yield from check_drawn_budgets(contract, form, meter, examples=effort.memory_examples)


def meter_of(contract: Contract, meter: Meter, *, simulates: bool = False) -> Meter:
    """Return the meter of a contract where ``meter`` was chosen: the host meter for host memory, and only for that; and
    one that ``simulates`` a GPU where a check needs that."""
    if contract.memory == "host":
        from ..meters.host import HostMeter

        return HostMeter(lines=False)  # a failure looks them up
    return get_meter("simulated") if meter.name == "host" or (simulates and meter.simulation is None) else meter


# ---------------------------------------------------------------- putting outcomes together
def put_together(contract: Contract, plan: Sequence[Check], found: Found) -> Examination:
    """Make one examination of what the checks of ``plan`` found."""
    from .form_call import FormCall
    from .memory import judge_case

    forms = tuple(dict.fromkeys(check.form for check in plan if check.kind == "equality"))
    standings = {form: standing_of(contract, form, found) for form in forms}
    equal = [form for form, standing in standings.items() if standing.no_memory is None]
    told: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    readings: dict[Where, Reading] = {}
    for check in plan:
        if check in found:
            kind = "memory" if check.kind in MEASURED else "law" if check.kind in LAWS else check.kind
            told[check.form, kind] += found[check].findings
            readings |= {(check.form, check.case, phase): r for phase, r in found[check].readings.items()}
    findings: list[Finding] = []
    for form, standing in standings.items():
        findings += [*standing.equality, *told[form, "bad input"]]
    for form in (NAIVE, *equal):
        findings += told[form, "memory"]
    for form, standing in standings.items():
        judged: list[Finding] = []
        for case in dict.fromkeys(case for _, case, _ in readings):
            trusted = {(f, p): r for (f, c, p), r in readings.items() if c == case and f in (NAIVE, form, *equal)}
            judged += judge_case(FormCall.at_case(contract, form, case), trusted)
        findings += unless_unequal(standing.no_memory, [*judged, *told[form, "law"]])
    known_unequal = frozenset(form for form in forms if contract.forms[form].known_unequal)
    return Examination(contract.name, (NAIVE, *forms), tuple(findings), readings, frozenset(equal), known_unequal)


# ---------------------------------------------------------------- what follows from equality
@dataclass(frozen=True)
class Standing:
    """Where a form stands after its equality checks. ``no_memory`` says why none of its memory can pass; None where
    the form was found equal in every dtype."""

    equality: tuple[Finding, ...]
    """Findings in the order of the dtypes, up to the first that is no pass."""
    no_memory: Finding | None


def standing_of(contract: Contract, form: str, found: Found) -> Standing:
    asked = [check for check in found if (check.kind, check.form) == ("equality", form)]
    equality: list[Finding] = []
    for check in sorted(asked, key=lambda check: contract.dtypes.index(check.dtype)):
        equality += found[check].findings
        if equality[-1].status != "pass":
            break
    is_whole = {check.dtype for check in asked} >= {*contract.dtypes}
    last = equality[-1] if equality else None
    if last is not None and last.status == "pass" and is_whole and not contract.forms[form].known_unequal:
        return Standing(tuple(equality), None)
    return Standing(tuple(equality), no_memory_passes(contract, form, last))


def no_memory_passes(contract: Contract, form: str, last: Finding | None) -> Finding:
    """Return a note that says why no memory check of a form can pass. ``last`` is its last finding of equality."""
    why = "is not equal to naive" if last is not None and last.status == "fail" else "was not compared with naive"
    message = f"no memory of it can pass: the form {why}"
    if contract.forms[form].known_unequal:
        message = "memory not judged: the form is known to be not equal to naive"
    return Finding("budget", contract.name, form, "note", message)


def unless_unequal(no_memory: Finding | None, judged: Sequence[Finding]) -> Sequence[Finding]:
    """Return what was ``judged`` of a form's memory. Of an unequal form, return why none can pass, and the failures:
    one and the same line may have made it wrong and large."""
    return judged if no_memory is None else [no_memory, *(finding for finding in judged if finding.status == "fail")]
