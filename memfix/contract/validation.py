"""Finds what contradicts itself in a contract. Each fault names the part, and the nearest right name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..errors import ContractError, did_you_mean
from ..laws import NAIVE, Budget, Scaling, SpeedBudget
from .dtypes import WORKING_DTYPES
from .form import FLOOR, Form
from .signatures import keywords_of, parameters_of

if TYPE_CHECKING:
    from .contract import Contract

Law = Budget | Scaling | SpeedBudget


def validate(contract: Contract) -> None:
    if not contract.name or not contract.name.replace("_", "").isalnum():
        raise ContractError(f"a contract's name must be a word of letters, digits and _, got {contract.name!r}")
    for fault in _faults(contract):  # a later check may rely on an earlier one: only the first fault is looked for
        raise ContractError(f"{contract.name}: {fault}")


def _faults(contract: Contract) -> Iterator[str]:
    yield from _faults_of_parts(contract)
    yield from _faults_of_memory(contract)
    yield from _faults_of_inputs(contract)
    yield from _faults_of_signatures(contract)
    laws: list[Law] = [*contract.budgets, *contract.scaling, *contract.speed]
    for law in laws:
        yield from _unless_known("a budget names the form", law.form, contract.forms)
        if law.case is not None:
            yield from _unless_known("a budget names the case", law.case, contract.cases)
    for series in contract.scaling:
        yield from _unless_known("a scaling law names the dim", series.dim, contract.dims)
    for budget in contract.budgets:
        yield from _faults_of_budget(contract, budget)
    for key, form in contract.forms.items():
        yield from _faults_of_known_unequal(contract, key, form, laws)
        is_broken = any(b.form == key and b.known_broken for b in contract.budgets)
        if form.reported and not is_broken and not form.known_unequal:
            yield (
                f"the reported form {key!r} needs the budget that it breaks, with known_broken=True, or known_unequal="
            )


def _unless_known(what: str, name: str, known: Iterable[str]) -> Iterator[str]:
    if name not in known:
        yield f"{what} {name!r}{did_you_mean(name, known)}"


def _faults_of_parts(contract: Contract) -> Iterator[str]:
    if not contract.forms or not contract.inputs:
        yield "a contract needs at least one form and one input"
    if not contract.cases:
        yield "a contract needs at least one case, or nothing would be measured"
    for word, what in ((NAIVE, "the reference"), (FLOOR, "the work below all forms")):
        if word in contract.forms:
            yield f"{word!r} is {what} and cannot be the name of a form"
    for kind, names in (("form", contract.forms), ("case", contract.cases)):
        for word in names:
            if not re.fullmatch(r"\w+", word):  # the lock file and the tests' names hold it
                yield f"the name of a {kind} must be a word of letters, digits and _, got {word!r}"
    for dtype in contract.dtypes:
        if dtype not in WORKING_DTYPES:
            yield f"dtypes must be some of {WORKING_DTYPES}, got {dtype!r}"


def _faults_of_memory(contract: Contract) -> Iterator[str]:
    if contract.memory not in ("gpu", "host"):
        yield f"memory must be one of ('gpu', 'host'), got {contract.memory!r}"
    if contract.memory == "gpu":
        if contract.has_objects:
            yield "an ObjectSpec is host memory; declare the contract with memory='host'"
        return
    for spec in contract.inputs:
        if spec.grad:
            yield f"memory='host' measures no backward; drop grad=True of input {spec.name!r}"
    for name, form in contract.forms.items():
        if form.has_kernels:
            yield f"memory='host' measures no GPU; drop has_kernels=True of form {name!r}"


def _faults_of_inputs(contract: Contract) -> Iterator[str]:
    for spec in contract.inputs:
        for dim in sorted(spec.dims - contract.dims.keys()):
            yield f"input {spec.name!r} uses {dim!r}, which is no dim{did_you_mean(dim, contract.dims)}"
        often = spec.sometimes
        if isinstance(often, str) and often not in contract.choices:
            nearest = did_you_mean(often, contract.choices)
            yield f"input {spec.name!r} is sometimes {often!r}, which is no choice{nearest}"


def _faults_of_signatures(contract: Contract) -> Iterator[str]:
    settings = {*contract.dims, *contract.choices}
    used = set(contract.shape_dims())
    for form in (NAIVE, *contract.forms, *([FLOOR] if contract.floor is not None else [])):
        function = contract.function(form)
        if not callable(function):
            yield f"{form} must be callable, got {function!r}"
        used |= keywords_of(function, len(contract.inputs)) & settings
        for parameter in parameters_of(function)[len(contract.inputs) :]:
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is not parameter.empty or is_variadic:
                continue
            if parameter.name not in settings:
                yield f"{form} takes {parameter.name!r}, which is no input, dim or choice"
            if parameter.kind is parameter.POSITIONAL_ONLY:
                yield (
                    f"{form} takes {parameter.name!r} by position only, and dims and choices are given by name; "
                    "wrap it in a function that takes it by name"
                )
    for setting in sorted(settings - used):
        yield f"{setting!r} is no axis of an input and no form takes it"


def _faults_of_budget(contract: Contract, budget: Budget) -> Iterator[str]:
    if budget.formula is not None:
        known = [*contract.dims, "e"]
        for unknown in sorted(budget.formula.names - {*known}):
            nearest = did_you_mean(unknown, known)
            yield f"unknown name {unknown!r} in the budget formula {budget.formula.text!r}{nearest}"
    if budget.reference not in (None, NAIVE):
        yield from _unless_known("times_below names the form", str(budget.reference), contract.forms)
    if budget.known_broken and not contract.forms[budget.form].reported:
        yield f"only a reported form may carry a known_broken budget; {budget.form!r} is not reported"


def _faults_of_known_unequal(contract: Contract, key: str, form: Form, laws: Iterable[Law]) -> Iterator[str]:
    for dtype, why in form.known_unequal.items():
        if dtype not in contract.dtypes:
            nearest = did_you_mean(dtype, contract.dtypes)
            yield f"{key!r} is known to be unequal in {dtype!r}, which is no dtype of the contract{nearest}"
        if not why.strip():
            yield f"say why {key!r} is known to be unequal in {dtype}"
    if form.known_unequal and not form.reported:
        yield f"only a reported form may be known_unequal; {key!r} is not reported"
    if form.known_unequal and any(key in (law.form, getattr(law, "reference", None)) for law in laws):
        yield (
            f"a budget speaks of {key!r}, which is known to be unequal: its memory and time are not judged; "
            "drop the budget"
        )
