"""Run one check of a plan, whoever asks: what it found, or why it could not be found out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..contract import Contract
from ..errors import MemfixError
from ..laws import Phase, Scaling, SpeedBudget
from ..meters.base import Meter, Reading
from .effort import Effort
from .finding import Finding
from .plan import LAWS, Check, Found, Outcome, is_due, meter_of

Say = Callable[[str], None]


class Tools(Protocol):
    """What checks are run with. ``meter`` measures the cases, ``simulated_meter`` the laws beyond them."""

    @property
    def effort(self) -> Effort: ...
    @property
    def meter(self) -> Meter: ...
    @property
    def simulated_meter(self) -> Meter: ...


@dataclass(frozen=True)
class OneMeter:
    """Tools for a plan that asks only what this meter can measure."""

    meter: Meter
    effort: Effort

    @property
    def simulated_meter(self) -> Meter:
        return self.meter


def run_checks(
    contract: Contract, checks: Iterable[Check], tools: Tools, found: Found, say: Say = lambda _: None
) -> Found:
    """``found``, with the outcomes of those ``checks`` that are still due. ``say`` is told what is under way."""
    for check in checks:
        if is_due(check, contract, tools.meter, found):
            say(str(check))
            found[check] = run_check(check, contract, tools)
    return found


def run_check(check: Check, contract: Contract, tools: Tools) -> Outcome:
    """What one check finds. That something cannot be measured is a finding, and no exception."""
    if check.kind == "memory":
        return _memory(check, contract, meter_of(contract, tools.meter))
    try:
        return Outcome(tuple(_findings(check, contract, tools)))
    except Exception as error:
        if check.kind not in LAWS:
            raise
        meter = meter_of(contract, tools.simulated_meter)
        message, phase = _could_not(meter, error), check.law.phase if check.law else None
        return Outcome((Finding(check.kind, contract.name, check.form, "error", message, check.case or None, phase),))


def _findings(check: Check, contract: Contract, tools: Tools) -> Iterator[Finding]:
    form, effort = check.form, tools.effort
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

        yield check_compiles(contract, form, tools.simulated_meter)
    elif isinstance(check.law, Scaling):
        from .scaling import check_scaling

        yield check_scaling(contract, check.law, meter_of(contract, tools.simulated_meter))
    elif isinstance(check.law, SpeedBudget):
        from .speed import check_speed

        yield check_speed(contract, check.law)
    elif check.kind == "agreement":
        from .agreement import check_agreement

        yield from check_agreement(contract, form, check.case, tools.simulated_meter)
    else:
        from .memory import check_drawn_budgets

        meter = meter_of(contract, tools.simulated_meter)
        drawn = check_drawn_budgets(contract, form, meter, examples=effort.memory_examples)
        if drawn is not None:
            yield drawn
        elif contract.budgets and not contract.forms[form].reported:
            message = (
                "no budget holds at every shape, so what it takes beyond the cases may grow: add one without a case"
            )
            yield Finding("budget", contract.name, form, "error", message)


def _memory(check: Check, contract: Contract, meter: Meter) -> Outcome:
    """What a form takes at a case in every phase. A phase that does not fit the GPU is simulated."""
    readings: dict[Phase, Reading] = {}
    errors: list[Finding] = []
    for phase, outcome in _phases(check, contract, meter):
        if isinstance(outcome, Reading):
            readings[phase] = outcome
        else:
            message = _could_not(meter, outcome)
            errors.append(Finding("memory", contract.name, check.form, "error", message, check.case, phase))
    return Outcome(tuple(errors), readings)


def _phases(check: Check, contract: Contract, meter: Meter) -> Iterator[tuple[Phase, Reading | Exception]]:
    from .inputs import Draw, phases_beside, phases_of
    from .memory import measure, measure_phases, too_large_for

    form, draw, every = check.form, Draw(contract.cases[check.case]), phases_of(contract)
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
                yield phase, error


def _could_not(meter: Meter, error: Exception) -> str:
    what = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
    if type(error).__name__ == "OutOfMemoryError":  # torch explains its allocator in a paragraph
        what = what.partition(". ")[0]
    return f"could not be measured, meter {meter.name}: {what}"
