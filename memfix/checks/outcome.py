"""Run the checks of a plan. A check that cannot measure gives a finding that says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ..contract import Contract
from ..laws import Scaling, SpeedBudget
from ..meters.base import Meter
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
    """Run one check. A measurement that raises gives a finding, not an exception."""
    from .form_call import FormCall
    from .measuring import measure_case, not_measured

    meter = meter_of(contract, tools.meter if check.kind == "memory" else tools.simulated_meter)
    if check.kind == "memory":
        return measure_case(FormCall.at_case(contract, check.form, check.case), meter)
    try:
        return Outcome(tuple(_findings(check, contract, meter, tools.effort)))
    except Exception as error:
        if check.kind not in LAWS:
            raise
        message, phase = not_measured(meter, error), check.law.phase if check.law else None
        return Outcome((Finding(check.kind, contract.name, check.form, "error", message, check.case or None, phase),))


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
        from .memory import check_drawn_budgets

        drawn = check_drawn_budgets(contract, form, meter, examples=effort.memory_examples)
        if drawn is not None:
            yield drawn
        elif contract.budgets and not contract.forms[form].reported:
            message = (
                "no budget holds at every shape, so what it takes beyond the cases may grow: add one without a case"
            )
            yield Finding("budget", contract.name, form, "error", message)
