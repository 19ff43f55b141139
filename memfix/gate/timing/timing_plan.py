"""Where the forms of an op are timed. Plain data; imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...contract import Case, Contract
from ...laws import Phase

Against = str
"""What a form is timed against: ``base``, ``naive``, or ``canary``, itself made slower on purpose."""
BASE, NAIVE_FORM, CANARY = "base", "naive", "canary"


@dataclass(frozen=True)
class Place:
    """One form at one case in one phase. ``times_naive`` is the contract's budget there, where it has one."""

    form: str
    case: str
    phase: Phase
    times_naive: float | None = None


def places_of(contract: Contract, device: str) -> list[Place]:
    """Wherever the contract has a speed budget for ``device``.

    A form without one is timed at the smallest case: it can get slower too. What is known to be unequal is not timed,
    nor, without a budget, is what a report shipped, nor an interpreted kernel. At that size a GPU waits for launches,
    which a CPU times as well, and with less noise: beside forms with a budget it is left to that.
    """
    laws = [law for law in contract.speed if law.device == device]
    places = [Place(law.form, law.case, law.phase, law.times_naive) for law in laws]
    phase: Phase = "train" if any(spec.grad for spec in contract.inputs) else "forward"
    with_budget = {place.form for place in places}
    for name, form in contract.forms.items():
        is_interpreted = form.has_kernels and device == "cpu"
        is_launches = not form.has_kernels and device == "cuda" and bool(with_budget)
        if name not in with_budget and not (form.reported or form.known_unequal or is_interpreted or is_launches):
            places.append(Place(name, smallest_case(contract).name, phase))
    return places


def smallest_case(contract: Contract) -> Case:
    def elements(case: Case) -> int:
        return sum(math.prod(spec.size(case.dims)) for spec in contract.inputs)

    return min(contract.cases.values(), key=elements)
