"""Plan the checks of a contract.

It is decided here alone which checks run, for ``memfix gate``, its workers, ``memfix check`` and ``memfix.suite``:

- Kernels are compared on the GPU where there is one; elsewhere Triton's are interpreted, and CUDA's are emulated on the
  CPU. Other forms are compared on the CPU.
- After one dtype in which a form is unequal, the other dtypes are not compared: they would show the same.
- A form that is known to be unequal is compared, and its memory is not measured.
- Cases are measured by the chosen meter. A meter that really runs steps skips a form that gave a wrong answer; a
  simulated one measures it, since one and the same line may have made it wrong and large.
- Variants, growth, budgets at drawn shapes and kernels that compile are checked by the simulated meter only: a real
  GPU need not hold shapes that nobody chose, and compiles what it launches.
- Host memory is measured by the host meter, whichever meter was chosen, also beyond the cases.
- No memory of a form passes unless the form was found equal in every dtype.

A check is plain data; ``examine`` runs the checks, and judges what they found.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..contract import Contract
from ..laws import NAIVE, Scaling, SpeedBudget
from ..meters.base import Meter

if TYPE_CHECKING:
    from .calls import Place

Kind = Literal["equality", "bad input", "memory", "variant", "compile", "budget", "scaling", "speed", "agreement"]
"""The name of a check in its findings. ``memory`` measures a case, ``variant`` a small call with one other option, and
``budget`` judges drawn shapes."""
LAWS: tuple[Kind, ...] = ("variant", "compile", "budget", "scaling")
"""The checks beyond the cases, by the simulated meter."""
MEASURED: tuple[Kind, ...] = ("memory", "variant")
"""The checks whose readings the lock has."""


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
        plan += _memory_checks(contract, form, laws=not really_runs(contract, meter))
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
        from .variants import variants

        yield from (Check(contract.name, "variant", form, case=name) for name in variants(contract))
        if contract.forms[form].has_kernels:
            yield Check(contract.name, "compile", form)
        yield Check(contract.name, "budget", form)
        growth = (law for law in contract.scaling if law.form == form)
        yield from (Check(contract.name, "scaling", form, case=law.case, law=law) for law in growth)


def really_runs(contract: Contract, meter: Meter) -> bool:
    """Whether forms run on a real GPU, where checks that need none are left out."""
    return contract.memory == "gpu" and meter.simulation is None and meter.name != "host"
