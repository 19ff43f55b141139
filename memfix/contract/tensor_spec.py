"""One tensor argument of an op: its shape, its dtype and its values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from ..errors import ContractError, did_you_mean
from .case import Case
from .dtypes import DTYPE_BYTES, INTEGER_DTYPES, WIDE, WORKING, WORKING_DTYPES, is_floating
from .old_spelling import refuses_old_spelling
from .values import FromFunction, Mask, Normal, Values

Layout = Literal["contiguous", "transposed", "strided", "sliced"]
LAYOUTS: tuple[Layout, ...] = ("contiguous", "transposed", "strided", "sliced")
Pattern = Literal["even", "runs", "alike"]
PATTERNS: tuple[Pattern, ...] = ("even", "runs", "alike")


@refuses_old_spelling
@dataclass(frozen=True)
class TensorSpec:
    """One tensor argument, passed to every form in the order of the contract's ``inputs``.

    ``shape`` names dims: ``"T D"``; a number stands for itself, ``"S+1"`` is one more than S, ``"2*F"`` is twice F,
    ``""`` is a scalar.
    ``dtype``: the working dtype of the case unless one is named; ``"wide"`` is float32, or float64 where the case works
    in that. ``grad``: the input may need a gradient; draws freeze it now and then.

    ``values`` says what the elements are: ``Normal()``, ``Uniform(low, high)``, ``LogUniform(low, high)``,
    ``Integers(high)``, ``Mask()``, ``Cuts(dim)``, or a function (``memfix/contract/values.py``). A floating input is
    ``Normal()`` unless it says otherwise, and a bool is a ``Mask()``; an integer input has to say.
    ``sometimes`` is a value that replaces a random share of the elements (none and all of them included), or the name
    of a choice that holds it, such as an ignore index.
    ``patterns`` are ways in which the values of a call may depend on each other (``checks/inputs.py``); leave one out
    only where every form, naive included, loses all digits on it.

    ``layouts`` are the strides that draws may give it. An ``optional`` input may be None: draws leave it out now and
    then, and a case does unless its ``present`` names it. ``also_in`` are floating dtypes that the input may have
    beside its own, such as float32 gates of a 16-bit model; equality draws them, and cases have its own.
    """

    name: str
    shape: str
    dtype: str = WORKING
    grad: bool = False
    values: Values | Callable[..., Any] | None = None
    sometimes: float | str | None = None
    layouts: tuple[Layout, ...] = LAYOUTS
    patterns: tuple[Pattern, ...] = PATTERNS
    optional: bool = False
    also_in: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.dtype not in (WORKING, WIDE, *DTYPE_BYTES):
            self._refuse(f"unknown dtype {self.dtype!r}{did_you_mean(self.dtype, [WIDE, *DTYPE_BYTES])}")
        if self.grad and not self.is_floating:
            self._refuse(f"{self.dtype} cannot take a gradient; drop grad=True")
        object.__setattr__(self, "values", self._values_or_default())
        for dtype in self.also_in:
            if dtype not in WORKING_DTYPES or not self.is_floating:
                self._refuse(f"also_in needs a floating input and some of {WORKING_DTYPES}, got {dtype!r}")
        for option, known in (("layouts", LAYOUTS), ("patterns", PATTERNS)):
            given = getattr(self, option)
            if set(given) - set(known) or not given:
                self._refuse(f"{option} must be some of {known}, got {given}")
        kind = self._kind
        if self.sometimes is not None and kind.is_complete:
            self._refuse(f"{kind!r} decides every element; drop sometimes=")
        if self.patterns != PATTERNS and not kind.has_patterns:
            self._refuse(f"{kind!r} has no patterns; drop patterns=")

    def _values_or_default(self) -> Values:
        values = self.values
        if values is None and self.dtype in INTEGER_DTYPES:
            self._refuse("an integer input needs values=Integers(high), where high is a number or the name of a dim")
        if values is None:
            return Mask() if self.dtype == "bool" else Normal()
        if isinstance(values, type) and issubclass(values, Values):
            self._refuse(f"values={values.__name__} is a class; write values={values.__name__}(...)")
        if not isinstance(values, Values) and not callable(values):
            self._refuse(
                "values must be Normal, Uniform, LogUniform, Integers, Mask, Cuts or a function of shape, generator "
                f"and dims, got {values!r}"
            )
        kind = values if isinstance(values, Values) else FromFunction(values)
        if not kind.holds():
            self._refuse(f"{kind!r} needs {kind.rule}")
        if not kind.suits(self.dtype, self.shape):
            self._refuse(f"{kind!r} needs {kind.needs}, got {self.dtype} and shape {self.shape!r}")
        return kind

    def _refuse(self, reason: str) -> NoReturn:
        raise ContractError(f"input {self.name!r}: {reason}")

    @property
    def _kind(self) -> Values:
        assert isinstance(self.values, Values)
        return self.values

    @property
    def has_patterns(self) -> bool:
        return self._kind.has_patterns

    @property
    def is_floating(self) -> bool:
        return is_floating(self.dtype)

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split())

    @property
    def dims(self) -> set[str]:
        """The dims that the shape and the values name."""
        return {_dim_of(axis) for axis in self.axes if not axis.isdigit()} | self._kind.dims

    def size(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        return tuple(_axis_size(axis, dims) for axis in self.axes)

    def dtype_at(self, case: Case) -> str:
        if self.dtype == WIDE:
            return case.dtype if DTYPE_BYTES[case.dtype] > DTYPE_BYTES["float32"] else "float32"
        return case.dtype if self.dtype == WORKING else self.dtype

    def spelled(self) -> str:
        """Return the spec as one line: shape, dtype, grad and values, and whatever else is not at its default."""
        always = ("shape", "dtype", "grad", "values")
        _, *options = dataclasses.fields(self)
        shown = [f for f in options if f.name in always or getattr(self, f.name) != f.default]
        return ", ".join(f"{f.name}={getattr(self, f.name)}" for f in shown)


def _axis_size(axis: str, dims: Mapping[str, int]) -> int:
    if axis.isdigit():
        return int(axis)
    return dims[_dim_of(axis)] * (2 if axis.startswith("2*") else 1) + axis.endswith("+1")


def _dim_of(axis: str) -> str:
    return axis.removeprefix("2*").removesuffix("+1")
