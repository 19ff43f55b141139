"""Which forms of an op are timed, and where. Plain data; imports no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...checks.measured import TimedAgainst
from ...contract import Case, Contract
from ...laws import Phase


@dataclass(frozen=True)
class TimedForm:
    """One form at one case in one phase. ``times_naive`` is the contract's budget there, where it has one."""

    form: str
    case: str
    phase: Phase
    times_naive: float | None = None


class Comparison(NamedTuple):
    """A form, and what its time is divided by."""

    timed: TimedForm
    against: TimedAgainst


def forms_to_time(contract: Contract, device: str) -> list[TimedForm]:
    """Every form with a speed budget on ``device``, at the budget's case; the other forms at the smallest case.

    Without a budget these are left out: reported forms, forms that are known to be unequal, kernels on a CPU (they are
    interpreted), and, where other forms have a budget on the GPU, forms without kernels there: at the smallest case
    they wait for launches, which a CPU times with less noise.
    """
    laws = [law for law in contract.speed if law.device == device]
    timed = [TimedForm(law.form, law.case, law.phase, law.times_naive) for law in laws]
    phase: Phase = "train" if any(spec.grad for spec in contract.inputs) else "forward"
    with_budget = {one.form for one in timed}
    for name, form in contract.forms.items():
        is_interpreted = form.has_kernels and device == "cpu"
        is_launches = not form.has_kernels and device == "cuda" and bool(with_budget)
        if name not in with_budget and not (form.reported or form.known_unequal or is_interpreted or is_launches):
            timed.append(TimedForm(name, smallest_case(contract).name, phase))
    return timed


def comparisons_of(contract: Contract, timed: Sequence[TimedForm], *, with_base: bool) -> list[Comparison]:
    """Every form against the base and, where it has a budget, naive; and, as the canary, one form against itself.

    Reported forms are compared with naive only: they are kept as the report shipped them.
    """
    chosen = [Comparison(one, "base") for one in timed if with_base and not contract.forms[one.form].reported]
    chosen += [Comparison(one, "naive") for one in timed if one.times_naive is not None]
    return [Comparison(timed[0], "canary"), *chosen] if chosen else []


def smallest_case(contract: Contract) -> Case:
    """The case whose inputs have the fewest elements."""

    def elements(case: Case) -> int:
        return sum(math.prod(spec.size(case.dims)) for spec in contract.inputs)

    return min(contract.cases.values(), key=elements)
