"""A contract: an op, the forms that save memory, and what each of them promises."""

from __future__ import annotations

import dataclasses
import keyword
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..errors import ContractError, did_you_mean
from ..laws import NAIVE, Budget, Scaling, SpeedBudget, Tolerance
from .case import Case, Dim
from .dtypes import WORKING_DTYPES
from .form import FLOOR, BadInput, Form
from .object_spec import ObjectSpec
from .signatures import keywords_of, parameters_of
from .tensor_spec import TensorSpec

Memory = Literal["gpu", "host"]
Law = Budget | Scaling | SpeedBudget


@dataclass(frozen=True, kw_only=True)
class Contract:
    """An op: what is true (``naive``), the forms that save memory, and what each of them promises.

    A form is called with the inputs in order; a dim or a choice that is one of its keywords
    (``rows_per_chunk``, ``reduction``) is passed by name, so naive need not have chunks.

    ``floor`` is called like a form. Without autograd it does only the work that every train step of the op needs, such
    as its matrix products. The time of a form is compared with it where naive's time says little.

    ``memory`` says whose bytes the budgets and scaling laws limit. Those of the ``host`` are measured by the host
    meter, whichever meter is asked for, and enter no lock: they depend on the version of Python.
    """

    name: str = field(kw_only=False)
    naive: Callable[..., Any]
    forms: Mapping[str, Any]  # a Form, or a plain function that becomes one
    dims: Mapping[str, Dim]
    inputs: Sequence[TensorSpec]
    cases: Mapping[str, Any]  # a Case, or a dict of its settings that becomes one
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    dtypes: Sequence[str] = WORKING_DTYPES
    tolerance: Tolerance = field(default_factory=Tolerance)
    budgets: Sequence[Budget] = ()
    scaling: Sequence[Scaling] = ()
    speed: Sequence[SpeedBudget] = ()
    bad_inputs: Sequence[BadInput] = ()
    repeats_backward: bool = False
    floor: Callable[..., Any] | None = None
    memory: Memory = "gpu"

    def __post_init__(self) -> None:
        forms = {key: form if isinstance(form, Form) else Form(form) for key, form in self.forms.items()}
        object.__setattr__(self, "forms", forms)
        if self.has_objects and self.dtypes == WORKING_DTYPES:
            object.__setattr__(self, "dtypes", ("float32",))  # objects have none: each call is compared once
        for key, values in self.choices.items():
            if not values:
                raise ContractError(f"{self.name}: choice {key!r} has no values")
        cases = {key: self.case_of(key, given) for key, given in self.cases.items()}
        object.__setattr__(self, "cases", cases)
        _validate(self)

    def case_of(self, name: str, given: Case | Mapping[str, Any]) -> Case:
        """Make a full case from ``{"T": 4096, "dtype": "bfloat16", ...}``; choices left out take their first value."""
        if isinstance(given, Case):
            given = {**given.settings, "dtype": given.dtype, "present": given.present}
        settings, where = dict(given), f"{self.name}, case {name!r}"
        dtype, present = settings.pop("dtype", "float32"), tuple(settings.pop("present", ()))
        optional = [spec.name for spec in self.inputs if spec.optional]
        for key in present:
            if key not in optional:
                raise ContractError(f"{where}: no optional input {key!r}{did_you_mean(key, optional)}")
        if dtype not in WORKING_DTYPES:
            raise ContractError(f"{where}: dtype must be one of {WORKING_DTYPES}, got {dtype!r}")
        known = [*self.dims, *self.choices]
        for key in settings:
            if key not in known:
                raise ContractError(f"{where}: no dim or choice {key!r}{did_you_mean(key, known)}")
        missing = [dim for dim in self.dims if dim not in settings]
        if missing:
            raise ContractError(f"{where}: missing {', '.join(missing)}")
        for dim, spec in self.dims.items():
            size = settings[dim]
            if type(size) is not int or size < spec.low:
                raise ContractError(f"{where}: {dim} must be an int of at least {spec.low}, got {size!r}")
            if size % spec.multiple_of:
                raise ContractError(f"{where}: {dim} must be a multiple of {spec.multiple_of}, got {size}")
        choices = {key: settings.get(key, values[0]) for key, values in self.choices.items()}
        for key, value in choices.items():
            if value not in self.choices[key]:
                raise ContractError(f"{where}: {key} must be one of {tuple(self.choices[key])}, got {value!r}")
        return Case(name, {dim: settings[dim] for dim in self.dims}, choices, dtype, present)

    def function(self, form: str) -> Callable[..., Any]:
        if form == NAIVE:
            return self.naive
        if form == FLOOR and self.floor is not None:
            return self.floor
        if form not in self.forms:
            raise ContractError(f"{self.name} has no form {form!r}{did_you_mean(form, [NAIVE, *self.forms])}")
        return self.forms[form].function

    def tolerance_of(self, form: str) -> Tolerance:
        return self.forms[form].tolerance or self.tolerance

    def repeats_backward_of(self, form: str) -> bool:
        own = None if form == NAIVE else self.forms[form].repeats_backward
        return self.repeats_backward if own is None else own

    @property
    def has_objects(self) -> bool:
        """Whether an input is no tensor: results are then compared by ``==``."""
        return any(isinstance(spec, ObjectSpec) for spec in self.inputs)

    def options(self, form: str, case: Case) -> dict[str, Any]:
        """Return the keywords that ``form`` takes from a case."""
        accepted = keywords_of(self.function(form), len(self.inputs))
        return {key: value for key, value in case.settings.items() if key in accepted}

    def defaults(self, form: str) -> dict[str, Any]:
        """Return the defaults of the keywords that ``form`` takes after its tensors; none for a wrapper, whose own code
        may need keywords for which the signature of the wrapped function has defaults."""
        function = self.function(form)
        if hasattr(function, "__wrapped__"):
            return {}
        after_tensors = parameters_of(function)[len(self.inputs) :]
        return {each.name: each.default for each in after_tensors if each.default is not each.empty}

    def shape_dims(self) -> list[str]:
        """Dims that are an axis of an input, in order; the rest are options such as chunk sizes."""
        axes = {dim for spec in self.inputs for dim in spec.dims}
        return [dim for dim in self.dims if dim in axes]

    @property
    def smallest_case(self) -> Case:
        """The case whose inputs have the fewest elements."""

        def elements(case: Case) -> int:
            return sum(math.prod(spec.size(case.dims)) for spec in self.inputs)

        return min(self.cases.values(), key=elements)

    def formula_values(self, case: Case) -> dict[str, int]:
        """The names that a budget formula may use at a case: dims, ``e`` and, as 0 or 1, the switches."""
        settings = {**case.choices, **dict.fromkeys(case.present, True)}
        return case.formula_values | {name: int(settings.get(name, False)) for name in self.switches()}

    def switches(self) -> list[str]:
        """Choices that are on or off, and optional inputs, which are there or not."""
        choices = [name for name, values in self.choices.items() if {*map(type, values)} == {bool}]
        return [*choices, *(spec.name for spec in self.inputs if spec.optional)]

    def budgets_of(self, form: str, case: str) -> list[Budget]:
        return [budget for budget in self.budgets if budget.form == form and budget.applies_to(case)]

    def with_form(self, name: str, function: Callable[..., Any], *, like: str) -> Contract:
        """Return this contract with one more form, held to the laws of ``like`` that it is not known to break."""

        def promised(laws: Sequence[Any]) -> list[Any]:
            kept = [law for law in laws if law.form == like and not getattr(law, "known_broken", False)]
            return [*laws, *(dataclasses.replace(law, form=name) for law in kept)]

        changed = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "name"}
        own = dataclasses.replace(self.forms[like], function=function, reported=False, known_unequal={})
        changed["forms"] = {**self.forms, name: own}
        for laws in ("budgets", "scaling", "speed"):
            changed[laws] = promised(changed[laws])
        return Contract(self.name, **changed)

    def laws(self) -> dict[str, str]:
        """Return everything promised: a short line for each law, by a key that stays when only its value changes."""
        lines = {"tolerance": self.tolerance.spelled()}
        lines["dtypes"] = ", ".join(self.dtypes)
        lines["repeats backward"] = str(self.repeats_backward).lower()
        lines |= {"memory": self.memory} if self.memory != "gpu" else {}
        for name, form in self.forms.items():
            lines[f"form {name}"] = form.spelled()
        lines |= {f"dim {name}": dim.spelled() for name, dim in self.dims.items()}
        lines |= {f"choice {name}": ", ".join(map(str, values)) for name, values in self.choices.items()}
        lines |= {f"input {spec.name}": spec.spelled() for spec in self.inputs}
        lines |= {f"case {name}": case.spelled() for name, case in self.cases.items()}
        lines |= {f"bad input {bad.name}": f"{bad.error.__name__}: {bad.message}" for bad in self.bad_inputs}
        for kind, laws in (("budget", self.budgets), ("scaling", self.scaling), ("speed", self.speed)):
            for law in laws:
                key = f"{kind} {law.form} [{law.case or 'every shape'}, {law.phase}]"
                number = sum(1 for other in lines if other.startswith(key))
                lines[key + (f" #{number + 1}" if number else "")] = law.spelled()
        return lines


# ---------------------------------------------------------------- validation
def _validate(contract: Contract) -> None:
    if not contract.name or not contract.name.replace("_", "").isalnum():
        raise ContractError(f"a contract's name must be a word of letters, digits and _, got {contract.name!r}")
    for fault in _faults(contract):  # only the first fault is found: a later check may rely on earlier ones
        raise ContractError(f"{contract.name}: {fault}")


def _faults(contract: Contract) -> Iterator[str]:
    yield from _faults_of_parts(contract)
    yield from _faults_of_names(contract)
    yield from _faults_of_memory(contract)
    yield from _faults_of_inputs(contract)
    yield from _faults_of_signatures(contract)
    laws: list[Law] = [*contract.budgets, *contract.scaling, *contract.speed]
    for law in laws:
        yield from _unless_known("a budget names the form", law.form, contract.forms)
        if law.case is not None:
            yield from _unless_known("a budget names the case", law.case, contract.cases)
    for series in contract.scaling:
        for dim in series.dims:
            yield from _unless_known("a scaling law names the dim", dim, contract.dims)
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
            if not re.fullmatch(r"\w+", word):  # it becomes part of lock entries and test names
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


def _faults_of_names(contract: Contract) -> Iterator[str]:
    """Inputs, dims and choices are arguments of forms and names in formulas."""
    inputs = [spec.name for spec in contract.inputs]
    for kind, names in (("an input", inputs), ("a dim", contract.dims), ("a choice", contract.choices)):
        for name in names:
            if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
                yield f"the name of {kind} must be a Python name and no keyword, got {name!r}"
    for name in inputs:
        if inputs.count(name) > 1:
            yield f"two inputs are named {name!r}; each needs a name of its own"
    for name in contract.dims:
        if name in _RESERVED:
            yield f"{name!r} cannot be the name of a dim: {_RESERVED[name]}"


_RESERVED = {
    "e": "in formulas it is the item size",
    "dtype": "in cases it is the working dtype",
    "present": "in cases it names the optional inputs that are there",
}


def _faults_of_inputs(contract: Contract) -> Iterator[str]:
    for spec in contract.inputs:
        for dim in sorted(spec.dims - contract.dims.keys()):
            ways = "; an axis is a dim, a number, 'S+1' or '2*S'" if not dim.isidentifier() else ""
            yield f"input {spec.name!r} uses {dim!r}, which is no dim{ways or did_you_mean(dim, contract.dims)}"
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
        known = [*contract.dims, *contract.switches(), "e"]
        for unknown in sorted(budget.formula.names - {*known}):
            is_choice = unknown in contract.choices
            nearest = "; choices count where they are on or off" if is_choice else did_you_mean(unknown, known)
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
