"""Plan the checks of a contract, and run them.

It is decided here alone which checks run, for ``memfix gate``, its workers, ``memfix check`` and ``memfix.suite``:

- Kernels are compared on the GPU where there is one; elsewhere Triton's are interpreted, and CUDA's are emulated on the
  CPU. Other forms are compared on the CPU.
- After one dtype in which a form is unequal, the other dtypes are not compared: they would show the same.
- A form that is known to be unequal is compared, and its memory is not measured.
- Cases are measured by the chosen meter. A meter that really runs steps skips a form that gave a wrong answer; a
  simulated one measures it, since one and the same line may have made it wrong and large.
- Growth, budgets at drawn shapes and kernels that compile are checked by the simulated meter only: a real GPU need
  not hold shapes that nobody chose, and compiles what it launches.
- Host memory is measured by the host meter, whichever meter was chosen, also beyond the cases.
- No memory of a form passes unless the form was found equal in every dtype.

A check is plain data. ``run_check`` runs any of them, and ``examine.put_together`` judges what they found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from ..contract import Contract
from ..errors import MemfixError, out_of_memory
from ..laws import NAIVE, Phase, Scaling, SpeedBudget
from ..meters.base import Meter, Reading
from .effort import Effort
from .finding import Finding

if TYPE_CHECKING:
    from .calls import Place

Kind = Literal["equality", "bad input", "memory", "compile", "budget", "scaling", "speed", "agreement"]
"""The name of a check in its findings. ``memory`` measures the cases, ``budget`` judges drawn shapes."""
LAWS: tuple[Kind, ...] = ("compile", "budget", "scaling")
"""The checks beyond the cases, by the simulated meter."""


@dataclass(frozen=True)
class Check:
    """One check of one form. It can be pickled to another process, and it is the key of its outcome."""

    op: str
    kind: Kind
    form: str
    dtype: str = ""
    place: Place = "cpu"
    case: str = ""
    bad_input: str = ""
    law: Scaling | SpeedBudget | None = None

    def __str__(self) -> str:
        """Return the progress message of this check."""
        return f"{self.op}/{self.form}: {self.kind} {self.dtype or self.case or self.bad_input}".rstrip()


@dataclass(frozen=True)
class Outcome:
    """What one check found. ``readings`` are those of a case, by phase."""

    findings: tuple[Finding, ...] = ()
    readings: Mapping[Phase, Reading] = field(default_factory=dict)


Found = dict[Check, Outcome]
Say = Callable[[str], None]


class Tools(Protocol):
    """What checks need to run: ``meter`` measures the cases, ``simulated_meter`` the laws beyond them."""

    @property
    def effort(self) -> Effort: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def simulated_meter(self) -> Meter: ...


@dataclass(frozen=True)
class OneMeter:
    """Tools for a plan of which one meter can measure everything."""

    meter: Meter
    effort: Effort

    @property
    def simulated_meter(self) -> Meter:
        return self.meter


# ---------------------------------------------------------------- plans
def gate_plan(
    contract: Contract, meter: Meter, *, forms: Sequence[str] | None = None, device: str | None = None
) -> list[Check]:
    """Return every check of ``forms``, or of all forms, but speed. Equality runs on ``device``, or where
    :func:`place_of` says. All forms follow each other in one dtype: they share its calls, and naive runs them once.
    """
    chosen = list(contract.forms) if forms is None else list(forms)
    compared = zip(*(equality_checks(contract, form, device) for form in chosen), strict=True)
    plan = [check for of_a_dtype in compared for check in of_a_dtype]
    plan += [check for form in chosen for check in _bad_inputs(contract, form)]
    for form in (NAIVE, *_measured_forms(contract, chosen)):
        plan += _memory_checks(contract, form, laws=not _really_runs(contract, meter))
    return plan


def suite_plan(contract: Contract) -> list[Check]:
    """Return every check that becomes a pytest test. Naive is measured when a form is compared with it."""
    plan: list[Check] = []
    for form in contract.forms:
        places = ("cpu", "cuda") if contract.memory == "gpu" else ("cpu",)
        plan += [check for place in places for check in equality_checks(contract, form, place)]
        plan += _bad_inputs(contract, form)
    measured = _measured_forms(contract, list(contract.forms))
    # only the gate reports a form without a budget for drawn shapes: a test would have nothing to judge
    drawn = {budget.form for budget in contract.budgets if budget.case is None}
    every = (check for form in measured for check in _memory_checks(contract, form, laws=True))
    plan += [check for check in every if check.kind != "budget" or check.form in drawn]
    plan += [Check(contract.name, "speed", law.form, case=law.case, law=law) for law in contract.speed]
    if contract.memory == "gpu":
        predicted = itertools.product((NAIVE, *measured), contract.cases)
        plan += [Check(contract.name, "agreement", form, case=case) for form, case in predicted]
    return plan


def equality_checks(contract: Contract, form: str, device: str | None = None) -> list[Check]:
    """Return one check for each dtype, on ``device`` or where :func:`place_of` says."""
    place = place_of(contract, form, device)
    return [Check(contract.name, "equality", form, dtype=dtype, place=place) for dtype in contract.dtypes]


def place_of(contract: Contract, form: str, device: str | None = None) -> Place:
    """Return where a form is compared: on ``device``, or where its kernels can run."""
    from ..meters.cuda import gpu_unavailable_reason

    declared = contract.forms[form]
    if device == "cuda" or (device is None and declared.has_kernels and gpu_unavailable_reason() is None):
        return "cuda"
    return "interpreter" if declared.is_interpreted else "cpu"


def _measured_forms(contract: Contract, forms: Sequence[str]) -> list[str]:
    return [form for form in forms if not contract.forms[form].known_unequal]


def _bad_inputs(contract: Contract, form: str) -> list[Check]:
    return [Check(contract.name, "bad input", form, bad_input=bad.name) for bad in contract.bad_inputs]


def _memory_checks(contract: Contract, form: str, *, laws: bool) -> Iterator[Check]:
    """Yield the cases of a form and, unless it is naive, the ``laws`` beyond them."""
    yield from (Check(contract.name, "memory", form, case=case) for case in contract.cases)
    if laws and form != NAIVE:
        if contract.forms[form].has_kernels:
            yield Check(contract.name, "compile", form)
        yield Check(contract.name, "budget", form)
        growth = (law for law in contract.scaling if law.form == form)
        yield from (Check(contract.name, "scaling", form, case=law.case, law=law) for law in growth)


# ---------------------------------------------------------------- running them
def run_checks(
    contract: Contract, checks: Iterable[Check], tools: Tools, found: Found, say: Say = lambda _: None
) -> Found:
    """Add to ``found`` the outcomes of those ``checks`` that are still due. ``say`` gets progress messages."""
    for check in checks:
        if is_due(check, contract, tools.meter, found):
            say(str(check))
            found[check] = run_check(check, contract, tools)
    return found


def is_due(check: Check, contract: Contract, meter: Meter, found: Found) -> bool:
    """Whether a check is still needed after what was found."""
    if check.kind == "equality":
        return all(finding.status == "pass" for finding in standing_of(contract, check.form, found).equality)
    is_spared = check.kind == "memory" and check.form != NAIVE and _really_runs(contract, meter)
    return not is_spared or standing_of(contract, check.form, found).no_memory is None


def run_check(check: Check, contract: Contract, tools: Tools) -> Outcome:
    """Run one check. A measurement that raises gives a finding, not an exception."""
    meter = meter_of(contract, tools.meter if check.kind == "memory" else tools.simulated_meter)
    if check.kind == "memory":
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

        drawn = check_drawn_budgets(contract, form, meter, examples=effort.memory_examples)
        if drawn is not None:
            yield drawn
        elif contract.budgets and not contract.forms[form].reported:
            message = (
                "no budget holds at every shape, so what it takes beyond the cases may grow: add one without a case"
            )
            yield Finding("budget", contract.name, form, "error", message)


def meter_of(contract: Contract, meter: Meter) -> Meter:
    """Return the meter of a contract where ``meter`` was chosen: the host meter for host memory, and only for that."""
    from ..meters import get_meter

    if contract.memory == "host":
        from ..meters.host import HostMeter

        return HostMeter(lines=False)  # a failure looks them up
    return get_meter("simulated") if meter.name == "host" else meter


def _really_runs(contract: Contract, meter: Meter) -> bool:
    """Whether forms run on a real GPU, where checks that need none are left out."""
    return contract.memory == "gpu" and meter_of(contract, meter).simulation is None


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
