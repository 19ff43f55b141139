"""Plan which forms of an op are timed, and at which sizes. Plain data; imports no torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...checks.measured import TimedAgainst
from ...contract import Case, Contract
from ...laws import Phase


@dataclass(frozen=True)
class TimedForm:
    """One form at one case in one phase. ``times_naive`` is the contract's budget there, where it has one.

    ``halvings`` says how often a dim of the case is halved, because the case itself takes too long.
    """

    form: str
    case: str
    phase: Phase
    times_naive: float | None = None
    halvings: int = 0

    def case_in(self, contract: Contract) -> Case:
        """The case as it is timed."""
        return halved(contract, contract.cases[self.case], self.halvings)

    def smaller(self, contract: Contract) -> list[TimedForm]:
        """Return the form at halved sizes, the smallest first; none where all dims are within their range already."""
        case = contract.cases[self.case]
        most = next(
            times for times in itertools.count() if _largest_dim(contract, halved(contract, case, times)) is None
        )
        return [dataclasses.replace(self, halvings=halvings) for halvings in range(most, 0, -1)]


class Comparison(NamedTuple):
    """A form, and what its time is divided by."""

    timed: TimedForm
    against: TimedAgainst

    def spelled(self) -> str:
        return f"{self.timed.form} [{self.timed.case}, {self.timed.phase}] against {self.against}"


def forms_to_time(contract: Contract, device: str) -> list[TimedForm]:
    """Return every form with a speed budget on ``device``, at the budget's case, and others at the smallest case.

    Without a budget these are left out: reported forms, forms that are known to be unequal, kernels on a CPU (they are
    interpreted), and, on a GPU where other forms have a budget, forms without kernels: at the smallest case they are
    bound by launches, which a CPU times with less noise.
    """
    laws = [law for law in contract.speed if law.device == device]
    timed = [TimedForm(law.form, law.case, law.phase, law.times_naive) for law in laws]
    phase: Phase = "train" if any(spec.grad for spec in contract.inputs) else "forward"
    with_budget = {one.form for one in timed}
    for name, form in contract.forms.items():
        is_interpreted = form.has_kernels and device == "cpu"
        is_launches = not form.has_kernels and device == "cuda" and bool(with_budget)
        if name not in with_budget and not (form.reported or form.known_unequal or is_interpreted or is_launches):
            timed.append(TimedForm(name, contract.smallest_case.name, phase))
    return timed


def comparisons_of(contract: Contract, timed: Sequence[TimedForm], *, with_base: bool) -> list[Comparison]:
    """Plan to compare every form with the base, those with a budget with naive, and one, as the canary, with itself.

    Reported forms are compared with naive only: they are kept as the report shipped them.
    """
    chosen = [Comparison(one, "base") for one in timed if with_base and not contract.forms[one.form].reported]
    chosen += [Comparison(one, "naive") for one in timed if one.times_naive is not None]
    return [Comparison(timed[0], "canary"), *chosen] if chosen else []


def halved(contract: Contract, case: Case, times: int) -> Case:
    """Halve the largest dim of the case ``times`` times.

    No dim becomes smaller than the largest size that equality draws.
    """
    for _ in range(times):
        if (dim := _largest_dim(contract, case)) is not None:
            spec = contract.dims[dim]
            size = max(spec.high, case.dims[dim] // 2 // spec.multiple_of * spec.multiple_of)
            case = dataclasses.replace(case, dims={**case.dims, dim: size})
    return case


def _largest_dim(contract: Contract, case: Case) -> str | None:
    """Return the largest of the dims that are above the sizes that equality draws."""
    above = {dim: size for dim, size in case.dims.items() if size > contract.dims[dim].high}
    return max(above, key=above.__getitem__, default=None)
