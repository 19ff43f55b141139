"""Every check of one contract, in order: equal first; small only where equal, but what grew is said of every form.

An examination has parts that know nothing of each other, so that several processes can share it: equality in one dtype,
what is refused, and the memory of one form. ``put_together`` makes one examination of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
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


@dataclass
class Found:
    """What the parts of an examination say, by the part. A part that is missing was not asked for."""

    equality: dict[tuple[str, str], Finding] = field(default_factory=dict)
    """By form and dtype."""
    refusals: dict[str, list[Finding]] = field(default_factory=dict)
    memory: dict[str, Measured] = field(default_factory=dict)

    def __ior__(self, other: Found) -> Found:
        self.equality |= other.equality
        self.refusals |= other.refusals
        self.memory |= other.memory
        return self

    def equal_forms(self, contract: Contract, forms: Sequence[str]) -> list[str]:
        """Those that were found equal in every dtype."""
        passed = {place for place, finding in self.equality.items() if finding.status == "pass"}
        known_unequal = contract.known_unequal_forms()
        return [f for f in forms if f not in known_unequal and all((f, dtype) in passed for dtype in contract.dtypes)]


@dataclass(frozen=True)
class Measured:
    """The memory of one form: its bytes at the cases, why some of them could not be had, and laws of its own."""

    readings: dict[tuple[str, Phase], Reading]
    """By case and phase."""
    errors: tuple[Finding, ...] = ()
    laws: tuple[Finding, ...] = ()
    """Kernels that compile, budgets at drawn shapes, and growth."""


def examine(
    contract: Contract,
    meter: Meter,
    effort: Effort,
    say: Say = lambda _: None,
    *,
    forms: Sequence[str] | None = None,
    device: str | None = None,
    seed: int = 0,
) -> Examination:
    """Every check but speed, of ``forms`` or all; equality on ``device``, or where :func:`examine_equality` says.
    ``say`` is told what is under way."""
    meter = meter_of(contract, meter)
    chosen = tuple(contract.forms) if forms is None else tuple(forms)
    found = Found()
    for form in chosen:
        for dtype in contract.dtypes:
            found |= examine_equality(contract, [form], dtype, effort, say, device=device, seed=seed)
            if found.equality[form, dtype].status != "pass":
                break  # one shrunken failure says it; the other dtypes would say it again
    found |= examine_refusals(contract, chosen)
    measured = found.equal_forms(contract, chosen)
    if meter.name == "simulated":  # a real GPU is spared what gave a wrong answer
        measured = [form for form in chosen if not contract.forms[form].known_unequal]
    for form in (NAIVE, *measured):
        found |= examine_memory(contract, form, meter, effort, say)
    return put_together(contract, chosen, found)


def examine_call(contract: Contract, draw: Draw, meter: Meter, *, forms: Sequence[str], device: str) -> list[Finding]:
    """Equality and every budget without a case, at one call."""
    from .equality import check_equality_at
    from .memory import measure_and_judge

    meter = meter_of(contract, meter)
    findings = []
    for form in forms:
        findings.append(check_equality_at(contract, form, draw, device=device))
        findings += measure_and_judge(contract, contract.budgets_of(form, draw.case.name), draw, meter)
    return findings


def meter_of(contract: Contract, meter: Meter) -> Meter:
    """The meter of a contract where ``meter`` is asked for: host memory is measured by the host meter, and nothing else
    is."""
    from ..meters import get_meter

    if contract.memory == "host":
        return get_meter("host")
    return get_meter("simulated") if meter.name == "host" else meter


# ---------------------------------------------------------------- parts
def examine_equality(
    contract: Contract,
    forms: Sequence[str],
    dtype: str,
    effort: Effort,
    say: Say = lambda _: None,
    *,
    device: str | None = None,
    seed: int = 0,
) -> Found:
    """Forms in one dtype, one after the other: they are held against the same calls, for which naive is run once.

    Without a ``device``, forms with kernels run on the GPU if there is one, and all others on the CPU.
    """
    from .equality import check_equality, usual_device

    found = Found()
    for form in forms:
        say(f"{contract.name}/{form}: equality in {dtype}")
        found.equality[form, dtype] = check_equality(
            contract,
            form,
            dtype=dtype,
            device=device or usual_device(contract, form),
            examples=effort.equality_examples,
            seed=seed,
        )
    return found


def examine_refusals(contract: Contract, forms: Sequence[str]) -> Found:
    """The calls that every form must refuse."""
    from .bad_inputs import check_bad_input

    return Found(refusals={f: [check_bad_input(contract, f, bad) for bad in contract.bad_inputs] for f in forms})


def examine_memory(contract: Contract, form: str, meter: Meter, effort: Effort, say: Say = lambda _: None) -> Found:
    """What one form takes at the cases; and, of all but naive, whether it keeps its laws where nobody looked."""
    meter = meter_of(contract, meter)
    readings: dict[tuple[str, Phase], Reading] = {}
    errors: list[Finding] = []
    for case in contract.cases:
        say(f"{contract.name}/{form}: memory at {case}")
        for phase, outcome in _outcomes(contract, form, case, meter):
            if isinstance(outcome, Reading):
                readings[case, phase] = outcome
            else:
                errors.append(outcome)
    laws = () if form == NAIVE or meter.name not in ("simulated", "host") else _laws(contract, form, meter, effort, say)
    return Found(memory={form: Measured(readings, tuple(errors), tuple(laws))})


def _outcomes(contract: Contract, form: str, case: str, meter: Meter) -> Iterator[tuple[Phase, Reading | Finding]]:
    """The reading of every phase, or why it could not be had. What does not fit is simulated instead of run."""
    from .inputs import Draw, phases_beside, phases_of
    from .memory import measure, measure_phases, too_large_for

    draw, every = Draw(contract.cases[case]), phases_of(contract)
    too_large = too_large_for(meter, contract, form, draw, every)
    yield from too_large.items()
    phases = [phase for phase in every if phase not in too_large]
    try:
        beside = phases_beside(phases) if phases else []
        measured = measure_phases(contract, form, draw, [*phases, *beside], meter)
        yield from ((phase, reading) for phase, reading in measured.items() if phase in phases or reading.peak_bytes)
    except Exception:  # in one of them, perhaps not in the others
        for phase in phases:
            try:
                yield phase, measure(contract, form, draw, phase, meter)
            except Exception as error:
                message = _could_not(meter, error)
                yield phase, Finding("memory", contract.name, form, "error", message, case, phase)


def _laws(contract: Contract, form: str, meter: Meter, effort: Effort, say: Say) -> Iterator[Finding]:
    """Not on a real GPU, which need not hold shapes that nobody chose, and compiles what it launches."""
    from .compiling import check_compiles
    from .memory import check_drawn_budgets
    from .scaling import check_scaling

    if contract.forms[form].has_kernels:
        say(f"{contract.name}/{form}: compiling its kernels")
        yield _judged("compile", contract, form, meter, partial(check_compiles, contract, form, meter))
    say(f"{contract.name}/{form}: budgets at drawn shapes")
    drawn = check_drawn_budgets(contract, form, meter, examples=effort.memory_examples)
    if drawn is not None:
        yield drawn
    elif contract.budgets and not contract.forms[form].reported:
        message = "no budget holds at every shape, so what it takes beyond the cases may grow: add one without a case"
        yield Finding("budget", contract.name, form, "error", message)
    for law in contract.scaling:
        if law.form == form:
            say(f"{contract.name}/{form}: growth with {law.dim}")
            judge = partial(check_scaling, contract, law, meter)
            yield _judged("scaling", contract, form, meter, judge, law.case, law.phase)


def _judged(
    check: str,
    contract: Contract,
    form: str,
    meter: Meter,
    judge: Callable[[], Finding],
    case: str | None = None,
    phase: Phase | None = None,
) -> Finding:
    """What ``judge`` says, or why it could not, as at the cases."""
    try:
        return judge()
    except Exception as error:
        return Finding(check, contract.name, form, "error", _could_not(meter, error), case, phase)


def _could_not(meter: Meter, error: Exception) -> str:
    what = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":  # torch explains its allocator in a paragraph
        what = what.partition(". ")[0]
    return f"could not be measured, meter {meter.name}: {what}"


# ---------------------------------------------------------------- together
def put_together(contract: Contract, forms: Sequence[str], found: Found) -> Examination:
    """One examination of ``forms``. No memory of a form that is not equal can pass; where it fails, that is said too:
    one and the same line may have made it wrong and large.
    """
    known_unequal = frozenset(forms) & set(contract.known_unequal_forms())
    equal = found.equal_forms(contract, forms)
    findings: list[Finding] = []
    for form in forms:
        findings += _until_unequal(contract, form, found)
        findings += found.refusals[form]
    trusted = {form: found.memory[form] for form in (NAIVE, *equal)}
    for memory in trusted.values():
        findings += memory.errors
    for form in forms:
        if form in equal:
            findings += _memory_findings(contract, form, trusted)
            continue
        *_, last = _until_unequal(contract, form, found)
        message = "is not equal to naive" if last.status == "fail" else "was not compared with naive"
        message = f"no memory of it can pass: the form {message}"
        if form in known_unequal:
            message = "memory not judged: the form is known to be not equal to naive"
        findings.append(Finding("budget", contract.name, form, "note", message))
        if form in found.memory:
            judged = _memory_findings(contract, form, {**trusted, form: found.memory[form]})
            findings += [finding for finding in judged if finding.status == "fail"]
    readings = {
        (form, *place): reading
        for form in (NAIVE, *forms)
        if form in found.memory
        for place, reading in found.memory[form].readings.items()
    }
    return Examination(contract.name, (NAIVE, *forms), tuple(findings), readings, frozenset(equal), known_unequal)


def _until_unequal(contract: Contract, form: str, found: Found) -> Iterator[Finding]:
    for dtype in contract.dtypes:
        finding = found.equality[form, dtype]
        yield finding
        if finding.status != "pass":
            return


def _memory_findings(contract: Contract, form: str, measured: Mapping[str, Measured]) -> list[Finding]:
    from .memory import forms_needed, judge_budget, judge_kept, judge_leak

    findings: list[Finding | None] = []
    for case in contract.cases.values():
        here = {(f, p): r for f, memory in measured.items() for (c, p), r in memory.readings.items() if c == case.name}
        findings += [
            judge_budget(contract, budget, case, here)
            for budget in contract.budgets_of(form, case.name)
            if all((f, budget.phase) in here for f in forms_needed(budget))
        ]
        findings += [judge_leak(contract, f, case, phase, reading) for (f, phase), reading in here.items() if f == form]
        findings.append(judge_kept(contract, form, case, here))
    return [*(finding for finding in findings if finding is not None), *measured[form].laws]
