"""The declaration of an op: its forms, the shapes they take, and what they promise. Plain frozen data.

One contract feeds every check: equality, memory, scaling, speed and bad inputs, under pytest, in the
gate and in the benchmarks. "KDA with chunk 64 must be 4x below dense" is one line of it::

    Budget("streamed", case="incident", times_below_naive=4)
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .errors import ContractError, did_you_mean
from .laws import NAIVE, Budget, Scaling, SpeedBudget, Tolerance

Layout = Literal["contiguous", "transposed", "strided"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided")
Pattern = Literal["even", "runs", "alike"]
PATTERNS: tuple[Pattern, ...] = ("even", "runs", "alike")

FLOOR = "floor"  # called for by name like a form, and no form: nobody holds it against naive

WORKING = "working"  # a TensorSpec's dtype: whatever the case or the draw works in
WIDE = "wide"  # float32, or the working dtype where that is wider: what sums and states are kept in

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
WORKING_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Dim:
    """The range from which a dimension or a chunk size is drawn for equality; cases may lie above it.

    ``multiple_of``: only multiples of it are sizes that the op takes, such as the even widths of a rotation.
    """

    low: int
    high: int
    multiple_of: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise ContractError(f"a Dim needs 0 <= low <= high, got low={self.low}, high={self.high}")
        if self.multiple_of < 1 or self.low % self.multiple_of or self.high % self.multiple_of:
            raise ContractError(
                f"a Dim needs low and high that are multiples of multiple_of, got low={self.low}, high={self.high}, "
                f"multiple_of={self.multiple_of}"
            )

    def nearest(self, size: int) -> int:
        """The largest size of this dim that is at most ``size``, or the smallest there is."""
        return max(self.low, min(self.high, size) // self.multiple_of * self.multiple_of)

    def spelled(self) -> str:
        return f"{self.low} to {self.high}" + (f", multiples of {self.multiple_of}" if self.multiple_of > 1 else "")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument, handed to every form in the order of the contract's ``inputs``.

    ``shape`` names dims: ``"T D"``; a number stands for itself, ``"S+1"`` is one more than S, ``""`` is a scalar.
    Floating inputs are normal with standard deviation ``scale``, over the root of the dim ``fan_in`` where that is
    given, so that a product over it is as large at every size; or uniform in ``[low, high)`` where those are given,
    with ``log_uniform`` in the logarithm of their size. Integers are uniform in ``[low, high)``, where ``high`` may be
    a dim; ``bool`` is a mask. ``cumulative`` names a dim that the integers cut into pieces: sorted, the first 0, the
    last the dim's size, repeats allowed. Shapes follow from those, so they are drawn even where values are not, and
    lie on the CPU.
    ``sometimes`` is a value that replaces a random share of the elements (none and all of them included), or the
    name of a choice that holds it, such as an ignore index. ``grad`` says that the input may need a gradient;
    draws freeze it now and then. An ``optional`` one may be None: draws leave it out now and then, and a case
    does unless its ``present`` names it. ``patterns`` are the ways in which values may go together within a call
    (``checks/values.py``); leave one out only where every form loses its digits there, naive among them.
    ``also_in`` are floating dtypes that the input may have beside its own, such as float32 gates of a 16-bit model;
    equality draws them, and cases have its own.
    """

    name: str
    shape: str
    dtype: str = WORKING
    grad: bool = False
    low: float | None = None
    high: float | str | None = None
    scale: float = 1.0
    sometimes: float | str | None = None
    layouts: tuple[Layout, ...] = LAYOUTS
    patterns: tuple[Pattern, ...] = PATTERNS
    optional: bool = False
    log_uniform: bool = False
    cumulative: str | None = None
    fan_in: str | None = None
    also_in: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in (WORKING, WIDE, *DTYPE_BYTES):
            raise ContractError(
                f"input {self.name!r}: unknown dtype {self.dtype!r}{did_you_mean(self.dtype, [WIDE, *DTYPE_BYTES])}"
            )
        if self.grad and not self.is_floating:
            raise ContractError(f"input {self.name!r}: {self.dtype} cannot take a gradient; drop grad=True")
        if self.cumulative is not None:
            self._require_cuts()
        elif self.dtype != "bool" and not self.is_floating and self.high is None:
            raise ContractError(f"input {self.name!r}: an integer input needs high=, a number or the name of a dim")
        for dtype in self.also_in:
            if dtype not in WORKING_DTYPES or not self.is_floating:
                raise ContractError(
                    f"input {self.name!r}: also_in needs a floating input and some of {WORKING_DTYPES}, got {dtype!r}"
                )
        if self.log_uniform:
            self._require_a_range_of_one_sign()
        unknown = set(self.layouts) - set(LAYOUTS)
        if unknown or not self.layouts:
            raise ContractError(f"input {self.name!r}: layouts must be some of {LAYOUTS}, got {self.layouts}")
        if set(self.patterns) - set(PATTERNS) or not self.patterns:
            raise ContractError(f"input {self.name!r}: patterns must be some of {PATTERNS}, got {self.patterns}")

    def _require_cuts(self) -> None:
        if self.dtype not in ("int32", "int64") or len(self.axes) != 1 or not self.axes[0].endswith("+1"):
            raise ContractError(
                f"input {self.name!r}: cumulative= needs int32 or int64 and a shape like 'S+1', "
                f"got {self.dtype} and {self.shape!r}"
            )
        if self.low is not None or self.high is not None or self.sometimes is not None:
            raise ContractError(f"input {self.name!r}: cumulative= says all values; drop low=, high= and sometimes=")

    def _require_a_range_of_one_sign(self) -> None:
        low, high = self.low, self.high
        if not self.is_floating or low is None or high is None or isinstance(high, str) or not low * high > 0:
            raise ContractError(
                f"input {self.name!r}: log_uniform needs a floating input with low and high of one sign, "
                f"got {self.dtype}, low={low}, high={high}"
            )

    @property
    def is_floating(self) -> bool:
        return self.dtype in (WORKING, WIDE) or "float" in self.dtype

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())

    @property
    def dims(self) -> set[str]:
        """The dims that this input's shape and range speak of."""
        named = {axis.removesuffix("+1") for axis in self.axes if not axis.isdigit()}
        return named | {dim for dim in (self.high, self.cumulative, self.fan_in) if isinstance(dim, str)}

    def size(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_axis_size(axis, dims) for axis in self.axes)

    def dtype_at(self, case: Case) -> str:
        """The dtype of this input where a case works in its own."""
        if self.dtype == WIDE:
            return case.dtype if DTYPE_BYTES[case.dtype] > DTYPE_BYTES["float32"] else "float32"
        return case.dtype if self.dtype == WORKING else self.dtype


@dataclass(frozen=True)
class Case:
    """One fixed shape of an op: every dim, every choice, the dtype it works in, and the optional inputs it has."""

    name: str
    dims: Mapping[str, int]
    choices: Mapping[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    present: tuple[str, ...] = ()

    @property
    def formula_values(self) -> dict[str, int]:
        return {**self.dims, "e": DTYPE_BYTES[self.dtype]}

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that a form may take as a keyword."""
        return {**self.dims, **self.choices}

    def spelled(self) -> str:
        """``N=3,D=1,dtype=float32``: what ``--at`` reads back."""
        parts = [f"{key}={value}" for key, value in {**self.settings, "dtype": self.dtype}.items()]
        return ",".join([*parts, *(f"present={name}" for name in self.present)])


@dataclass(frozen=True)
class Form:
    """A memory-saving way to compute what naive computes.

    ``reported``: an incident report shipped it as its fix; the budgets it is known to break are kept
    and the gate checks that it still breaks them. ``tolerance`` and ``repeats_backward``: where they are not the
    contract's; a form that does not repeat its backward must refuse the second one by the name of the op.
    ``known_unequal``: for a reported form that gives a wrong answer, the dtypes in which it does and why, such as
    ``{"bfloat16": "positions above 256 are rounded"}``. The gate checks that it still does; its memory is not judged.
    ``has_kernels``: it launches Triton kernels, which are interpreted where the tensors are on the CPU, and compiled
    for the GPU that is simulated.
    ``compared_with``: constants of its modules, by their dotted names, as they are while it is compared on the CPU.
    With smaller tiles and thresholds, such as ``{"package.kernels.BLOCK": 16}``, small calls pass them too.
    """

    function: Callable[..., Any]
    reported: bool = False
    tolerance: Tolerance | None = None
    known_unequal: Mapping[str, str] = field(default_factory=dict)
    repeats_backward: bool | None = None
    has_kernels: bool = False
    compared_with: Mapping[str, Any] = field(default_factory=dict)

    def spelled(self) -> str:
        own = f", tolerance {_spelled(self.tolerance)}" if self.tolerance else ""
        unequal = "; ".join(f"{dtype}: {why}" for dtype, why in self.known_unequal.items())
        own += "" if self.repeats_backward is None else f", repeats backward {str(self.repeats_backward).lower()}"
        own += "".join(f", compared with {name}={value!r}" for name, value in self.compared_with.items())
        return ("reported" if self.reported else "saves memory") + own + (unequal and f", known unequal in {unequal}")


@dataclass(frozen=True)
class BadInput:
    """A call that must be refused. ``change`` edits the arguments by name; the error must contain ``message``."""

    name: str
    change: Callable[[dict[str, Any]], None]
    message: str
    error: type[Exception] = ValueError


def setting(**values: Any) -> Callable[[dict[str, Any]], None]:
    """A ``change`` that gives arguments new values, or what a function makes of the old one."""

    def change(arguments: dict[str, Any]) -> None:
        for name, value in values.items():
            arguments[name] = value(arguments.get(name)) if callable(value) else value

    return change


@dataclass(frozen=True, kw_only=True)
class Contract:
    """An op: what is true (``naive``), the forms that save memory, and what each of them promises.

    A form is called with the inputs in order; a dim or a choice that is one of its keywords
    (``rows_per_chunk``, ``reduction``) is handed to it by name, so naive need not know of chunks.

    ``floor`` is called like a form and does, without autograd, the work that no train step of the op can do without,
    such as its matrix products: what the time of a form is set against where naive's says little.
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

    def __post_init__(self) -> None:
        forms = {key: form if isinstance(form, Form) else Form(form) for key, form in self.forms.items()}
        object.__setattr__(self, "forms", forms)
        for key, values in self.choices.items():
            if not values:
                raise ContractError(f"{self.name}: choice {key!r} has no values")
        cases = {key: self.case_of(key, given) for key, given in self.cases.items()}
        object.__setattr__(self, "cases", cases)
        _validate(self)

    def case_of(self, name: str, given: Case | Mapping[str, Any]) -> Case:
        """A full case from ``{"T": 4096, "dtype": "bfloat16", ...}``; choices left out take their first value."""
        if isinstance(given, Case):
            given = {**given.settings, "dtype": given.dtype, "present": given.present}
        settings = dict(given)
        dtype, present = settings.pop("dtype", "float32"), tuple(settings.pop("present", ()))
        optional = [spec.name for spec in self.inputs if spec.optional]
        for key in present:
            if key not in optional:
                raise ContractError(
                    f"{self.name}, case {name!r}: no optional input {key!r}{did_you_mean(key, optional)}"
                )
        if dtype not in WORKING_DTYPES:
            raise ContractError(f"{self.name}, case {name!r}: dtype must be one of {WORKING_DTYPES}, got {dtype!r}")
        for key in settings:
            if key not in self.dims and key not in self.choices:
                known = [*self.dims, *self.choices]
                raise ContractError(f"{self.name}, case {name!r}: no dim or choice {key!r}{did_you_mean(key, known)}")
        missing = [dim for dim in self.dims if dim not in settings]
        if missing:
            raise ContractError(f"{self.name}, case {name!r}: missing {', '.join(missing)}")
        for dim, spec in self.dims.items():
            if type(settings[dim]) is not int or settings[dim] < spec.low:
                raise ContractError(
                    f"{self.name}, case {name!r}: {dim} must be an int of at least {spec.low}, got {settings[dim]!r}"
                )
            if settings[dim] % spec.multiple_of:
                raise ContractError(
                    f"{self.name}, case {name!r}: {dim} must be a multiple of {spec.multiple_of}, got {settings[dim]}"
                )
        choices = {key: settings.get(key, values[0]) for key, values in self.choices.items()}
        for key, value in choices.items():
            if value not in self.choices[key]:
                raise ContractError(
                    f"{self.name}, case {name!r}: {key} must be one of {tuple(self.choices[key])}, got {value!r}"
                )
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

    def known_unequal_forms(self) -> list[str]:
        """Forms that are known to give a wrong answer: caught by equality, and so judged by nothing else."""
        return [name for name, form in self.forms.items() if form.known_unequal]

    def options(self, form: str, case: Case) -> dict[str, Any]:
        """The keywords that ``form`` takes from a case."""
        accepted = _keywords(self.function(form), len(self.inputs))
        return {key: value for key, value in case.settings.items() if key in accepted}

    def shape_dims(self) -> list[str]:
        """Dims that are an axis of an input, in order; the rest are options such as chunk sizes."""
        axes = {dim for spec in self.inputs for dim in spec.dims}
        return [dim for dim in self.dims if dim in axes]

    def budgets_of(self, form: str, case: str) -> list[Budget]:
        return [budget for budget in self.budgets if budget.form == form and budget.applies_to(case)]

    def with_form(self, name: str, function: Callable[..., Any], *, like: str) -> Contract:
        """This contract with one more form, held to what ``like`` promises, and not to what it is known to break."""

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
        """Everything promised, one short line a law, by a key that stays when only its value changes."""
        lines = {"tolerance": _spelled(self.tolerance)}
        lines["dtypes"] = ", ".join(self.dtypes)
        lines["repeats backward"] = str(self.repeats_backward).lower()
        for name, form in self.forms.items():
            lines[f"form {name}"] = form.spelled()
        lines |= {f"dim {name}": dim.spelled() for name, dim in self.dims.items()}
        lines |= {f"choice {name}": ", ".join(map(str, values)) for name, values in self.choices.items()}
        lines |= {f"input {spec.name}": _spelled_spec(spec) for spec in self.inputs}
        lines |= {f"case {name}": case.spelled() for name, case in self.cases.items()}
        lines |= {f"bad input {bad.name}": f"{bad.error.__name__}: {bad.message}" for bad in self.bad_inputs}
        for kind, laws in (("budget", self.budgets), ("scaling", self.scaling), ("speed", self.speed)):
            for law in laws:
                key = f"{kind} {law.form} [{law.case or 'every shape'}, {law.phase}]"
                number = sum(1 for other in lines if other.startswith(key))
                lines[key + (f" #{number + 1}" if number else "")] = law.spelled()
        return lines


def _axis_size(axis: str, dims: Mapping[str, int]) -> int:
    if axis.isdigit():
        return int(axis)
    return dims[axis.removesuffix("+1")] + axis.endswith("+1")


def _spelled(tolerance: Tolerance) -> str:
    text = str(tolerance).removeprefix("Tolerance")
    for unless_given in (", operand_ulps=0.0", ", absolute_ulps=0.0", ", rms_ulps=None"):
        text = text.replace(unless_given, "")
    return text


def _spelled_spec(spec: TensorSpec) -> str:
    unless_given = ("optional", "log_uniform", "cumulative", "fan_in", "also_in")
    hidden = {"name", *(option for option in unless_given if not getattr(spec, option))}
    hidden |= {"patterns"} if spec.patterns == PATTERNS else set()
    shown = [f"{f.name}={getattr(spec, f.name)}" for f in dataclasses.fields(spec) if f.name not in hidden]
    return ", ".join(shown)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """What ``function`` takes; of the ``apply`` of an autograd function, what its ``forward`` takes after ``ctx``.

    ``apply`` itself takes anything, or is a builtin without a signature, by the version of torch.
    """
    owner: Any = getattr(function, "__self__", None)
    is_apply = isinstance(owner, type) and function.__name__ == "apply" and hasattr(owner, "setup_context")
    if not is_apply:
        return list(_signature(function).parameters.values())
    parameters = list(_signature(owner.forward).parameters.values())
    definer = next(cls for cls in owner.__mro__ if "setup_context" in vars(cls))
    if definer.__module__ != "torch.autograd.function":  # its own, and then forward has no ctx
        return parameters
    # apply takes keywords only where setup_context is defined
    return [
        parameter.replace(kind=parameter.POSITIONAL_ONLY)
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        else parameter
        for parameter in parameters[1:]
    ]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Its annotations need not be names that exist: Python 3.14 would look them up now."""
    if sys.version_info >= (3, 14):
        import annotationlib

        return inspect.signature(function, annotation_format=annotationlib.Format.FORWARDREF)
    return inspect.signature(function)


def _keywords(function: Callable[..., Any], num_inputs: int) -> set[str]:
    """The names that ``function`` takes after its tensors."""
    parameters = parameters_of(function)
    after_tensors = [p for p in parameters[num_inputs:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return {p.name for p in after_tensors}


def _validate(contract: Contract) -> None:
    """Refuse a contract that contradicts itself, naming the part and the nearest right name."""
    name = contract.name
    if not name or not name.replace("_", "").isalnum():
        raise ContractError(f"a contract's name must be a word of letters, digits and _, got {name!r}")
    if not contract.forms or not contract.inputs:
        raise ContractError(f"{name}: a contract needs at least one form and one input")
    if not contract.cases:
        raise ContractError(f"{name}: a contract needs at least one case, or nothing would be measured")
    for word, what in ((NAIVE, "the reference"), (FLOOR, "the work below all forms")):
        if word in contract.forms:
            raise ContractError(f"{name}: {word!r} is {what} and cannot be the name of a form")
    for kind, names in (("form", contract.forms), ("case", contract.cases)):
        for word in names:
            if not re.fullmatch(r"\w+", word):  # the lock file and the tests' names hold it
                raise ContractError(
                    f"{name}: the name of a {kind} must be a word of letters, digits and _, got {word!r}"
                )
    for dtype in contract.dtypes:
        if dtype not in WORKING_DTYPES:
            raise ContractError(f"{name}: dtypes must be some of {WORKING_DTYPES}, got {dtype!r}")
    for spec in contract.inputs:
        for dim in spec.dims - contract.dims.keys():
            raise ContractError(
                f"{name}: input {spec.name!r} uses {dim!r}, which is no dim{did_you_mean(dim, contract.dims)}"
            )
        if isinstance(spec.sometimes, str) and spec.sometimes not in contract.choices:
            raise ContractError(
                f"{name}: input {spec.name!r} is sometimes {spec.sometimes!r}, which is no choice"
                f"{did_you_mean(spec.sometimes, contract.choices)}"
            )
    _validate_signatures(contract)
    laws: list[Budget | Scaling | SpeedBudget] = [*contract.budgets, *contract.scaling, *contract.speed]
    for law in laws:
        if law.form not in contract.forms:
            raise ContractError(f"{name}: a budget names the form {law.form!r}{did_you_mean(law.form, contract.forms)}")
        if law.case is not None and law.case not in contract.cases:
            raise ContractError(f"{name}: a budget names the case {law.case!r}{did_you_mean(law.case, contract.cases)}")
    for series in contract.scaling:
        if series.dim not in contract.dims:
            raise ContractError(
                f"{name}: a scaling law names the dim {series.dim!r}{did_you_mean(series.dim, contract.dims)}"
            )
    for budget in contract.budgets:
        _validate_budget(contract, budget)
    for key, form in contract.forms.items():
        is_broken = any(b.form == key and b.known_broken for b in contract.budgets)
        if form.reported and not is_broken and not form.known_unequal:
            raise ContractError(
                f"{name}: the reported form {key!r} needs the budget that it breaks, with known_broken=True, "
                "or known_unequal="
            )
        _validate_known_unequal(contract, key, form)


def _validate_known_unequal(contract: Contract, key: str, form: Form) -> None:
    for dtype, why in form.known_unequal.items():
        if dtype not in contract.dtypes:
            raise ContractError(
                f"{contract.name}: {key!r} is known to be unequal in {dtype!r}, which is no dtype of the contract"
                f"{did_you_mean(dtype, contract.dtypes)}"
            )
        if not why.strip():
            raise ContractError(f"{contract.name}: say why {key!r} is known to be unequal in {dtype}")
    if not form.known_unequal:
        return
    if not form.reported:
        raise ContractError(f"{contract.name}: only a reported form may be known_unequal; {key!r} is not reported")
    laws: list[Budget | Scaling | SpeedBudget] = [*contract.budgets, *contract.scaling, *contract.speed]
    if any(key in (law.form, getattr(law, "reference", None)) for law in laws):
        raise ContractError(
            f"{contract.name}: a budget speaks of {key!r}, which is known to be unequal: its memory and time are not "
            "judged; drop the budget"
        )


def _validate_signatures(contract: Contract) -> None:
    settings = {*contract.dims, *contract.choices}
    used = set(contract.shape_dims())
    for form in (NAIVE, *contract.forms, *([FLOOR] if contract.floor is not None else [])):
        function = contract.function(form)
        if not callable(function):
            raise ContractError(f"{contract.name}: {form} must be callable, got {function!r}")
        parameters = parameters_of(function)
        used |= _keywords(function, len(contract.inputs)) & settings
        for parameter in parameters[len(contract.inputs) :]:
            is_variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.default is not parameter.empty or is_variadic:
                continue
            if parameter.name not in settings:
                raise ContractError(
                    f"{contract.name}: {form} takes {parameter.name!r}, which is no input, dim or choice"
                )
            if parameter.kind is parameter.POSITIONAL_ONLY:
                raise ContractError(
                    f"{contract.name}: {form} takes {parameter.name!r} by position only, and dims and choices are "
                    "given by name; wrap it in a function that takes it by name"
                )
    for setting in settings - used:
        raise ContractError(f"{contract.name}: {setting!r} is no axis of an input and no form takes it")


def _validate_budget(contract: Contract, budget: Budget) -> None:
    if budget.formula is not None:
        for unknown in budget.formula.names - {*contract.dims, "e"}:
            raise ContractError(
                f"{contract.name}: unknown name {unknown!r} in the budget formula {budget.formula.text!r}"
                f"{did_you_mean(unknown, [*contract.dims, 'e'])}"
            )
    if budget.reference not in (None, NAIVE) and budget.reference not in contract.forms:
        raise ContractError(
            f"{contract.name}: times_below names the form {budget.reference!r}"
            f"{did_you_mean(str(budget.reference), contract.forms)}"
        )
    if budget.known_broken and not contract.forms[budget.form].reported:
        raise ContractError(
            f"{contract.name}: only a reported form may carry a known_broken budget; {budget.form!r} is not reported"
        )
