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

    A form without one is timed at the smallest case: it can get slower too. There a GPU waits for launches, which a CPU
    times as well and with less noise; so beside forms with a budget only kernels are, which a CPU would interpret. What
    is known to be unequal is not timed, nor, without a budget, is what a report shipped.
    """
    laws = [law for law in contract.speed if law.device == device]
    places = [Place(law.form, law.case, law.phase, law.times_naive) for law in laws]
    phase: Phase = "train" if any(spec.grad for spec in contract.inputs) else "forward"
    with_budget = {place.form for place in places}
    for name, form in contract.forms.items():
        if name in with_budget or form.reported or form.known_unequal:
            continue
        if not form.has_kernels if device == "cpu" else form.has_kernels or not with_budget:
            places.append(Place(name, smallest_case(contract).name, phase))
    return places


def smallest_case(contract: Contract) -> Case:
    def elements(case: Case) -> int:
        return sum(math.prod(spec.size(case.dims)) for spec in contract.inputs)

    return min(contract.cases.values(), key=elements)
