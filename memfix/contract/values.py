"""The kinds of values that an input may hold: ``TensorSpec(values=...)``. Plain frozen data.

- ``Normal(scale=1.0, fan_in=None)``: normal numbers, the default of floating inputs;
- ``Uniform(low, high)``: floating numbers in ``[low, high)``;
- ``LogUniform(low, high)``: floating numbers of one sign, the logarithm of their size uniform;
- ``Integers(high)`` or ``Integers(low, high)``: whole numbers below ``high``, a number or the name of a dim;
- ``Mask()``: True for a random share of the elements, the default of ``bool``;
- ``Cuts(dim)``: sorted integers from 0 to the size of a dim, which cut it into pieces;
- a function, ``lambda shape, generator, dims: tensor``: everything else.

``checks/inputs.py`` makes the tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from .dtypes import INTEGER_DTYPES, is_floating
from .signatures import signature_of


class Values:
    """One kind of values. Its ``TensorSpec`` calls ``holds`` and ``suits``, so that errors name the input."""

    rule: ClassVar[str] = ""
    """What its arguments must be, for the error message."""
    needs: ClassVar[str] = "a floating dtype"
    """What an input must be to hold such values, for the error message."""
    has_patterns: ClassVar[bool] = True
    """Whether ``TensorSpec.patterns`` apply: runs of large and small rows, rows that are alike."""
    is_complete: ClassVar[bool] = False
    """Whether it decides every element, so that ``TensorSpec.sometimes`` cannot replace any."""

    def holds(self) -> bool:
        return True

    def suits(self, dtype: str, shape: str) -> bool:
        return is_floating(dtype)

    @property
    def dims(self) -> set[str]:
        """The dims that the arguments name: all arguments that are strings."""
        return {value for value in vars(self).values() if isinstance(value, str)}

    def __repr__(self) -> str:
        """The shortest spelling that gives these values."""
        shown = [
            repr(value) if field.default is dataclasses.MISSING else f"{field.name}={value!r}"
            for field in dataclasses.fields(self)  # type: ignore[arg-type]
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class Normal(Values):
    """Normal numbers around 0 with standard deviation ``scale``, divided by the root of the dim ``fan_in`` if given.

    With ``fan_in="D"`` a product over D has the same magnitude at every D.
    """

    scale: float = 1.0
    fan_in: str | None = None

    rule = "a scale above 0, and as fan_in the name of a dim"

    def holds(self) -> bool:
        return _are_numbers(self.scale) and self.scale > 0 and isinstance(self.fan_in, str | None)


@dataclass(frozen=True, repr=False)
class Uniform(Values):
    """Numbers in ``[low, high)``, each as likely as the others."""

    low: float
    high: float

    rule = "two numbers, low below high"

    def holds(self) -> bool:
        return _are_numbers(self.low, self.high) and self.low < self.high


@dataclass(frozen=True, repr=False)
class LogUniform(Values):
    """Numbers between ``low`` and ``high``, equally many in every power of ten: sizes from tiny to huge."""

    low: float
    high: float

    rule = "two numbers of one sign, low below high"

    def holds(self) -> bool:
        return _are_numbers(self.low, self.high) and self.low < self.high and self.low * self.high > 0


@dataclass(frozen=True, repr=False)
class Integers(Values):
    """Whole numbers in ``[0, high)``, or with two bounds in ``[low, high)``; a bound is a number or a dim's name."""

    low: int | str = 0
    high: int | str | None = None

    rule = "whole numbers or names of dims, low below high"
    needs = "an integer dtype"

    def __post_init__(self) -> None:
        if self.high is None:  # one bound is the upper one, as in range()
            object.__setattr__(self, "high", self.low)
            object.__setattr__(self, "low", 0)

    def holds(self) -> bool:
        numbers: list[Any] = [bound for bound in (self.low, self.high) if not isinstance(bound, str)]
        return all(type(number) is int for number in numbers) and numbers == sorted({*numbers})

    def suits(self, dtype: str, shape: str) -> bool:
        return dtype in INTEGER_DTYPES

    def range_at(self, dims: Mapping[str, int]) -> tuple[int, int]:
        """Return ``low`` and ``high`` where the dims have these sizes."""
        low, high = (dims[bound] if isinstance(bound, str) else int(bound or 0) for bound in (self.low, self.high))
        return low, high

    def __repr__(self) -> str:
        return f"Integers({self.high!r})" if self.low == 0 else f"Integers({self.low!r}, {self.high!r})"


@dataclass(frozen=True, repr=False)
class Mask(Values):
    """True for a random share of the elements; equality also draws calls in which none or all are."""

    needs = "bool"
    has_patterns = False
    is_complete = True

    def suits(self, dtype: str, shape: str) -> bool:
        return dtype == "bool"


@dataclass(frozen=True, repr=False)
class Cuts(Values):
    """Sorted integers that cut a dim into pieces: the first is 0, the last the dim's size, repeats are allowed.

    Shapes inside a form follow from them, so they have values even where other inputs have none, as on the simulated
    GPU, and they are on the CPU.
    """

    dim: str

    rule = "the name of a dim"
    needs = "int32 or int64 and a shape like 'S+1'"
    has_patterns = False
    is_complete = True

    def holds(self) -> bool:
        return isinstance(self.dim, str)

    def suits(self, dtype: str, shape: str) -> bool:
        return dtype in ("int32", "int64") and len(shape.split()) == 1 and shape.endswith("+1")


@dataclass(frozen=True, repr=False)
class FromFunction(Values):
    """Values that a function makes from the shape, a generator and the sizes of the dims.

    ``function(shape, generator, dims)`` returns a tensor of ``shape``, on the CPU: floating for a floating input, which
    is then rounded to the input's dtype; whole numbers for an integer input; bool for bool. All randomness has to come
    from ``generator``, a ``torch.Generator`` on the CPU: the same seed must give the same values. ``dims`` maps the
    contract's dims to their sizes. The simulated meter knows no values and does not call it.
    """

    function: Callable[..., Any]

    rule = "to take three arguments: shape, generator and dims"
    has_patterns = False

    def holds(self) -> bool:
        try:
            signature_of(self.function).bind(None, None, None)
        except TypeError:
            return False
        except ValueError:  # a builtin without a signature
            return True
        return True

    def suits(self, dtype: str, shape: str) -> bool:
        return True  # what it returns is checked where it is called

    def __repr__(self) -> str:
        return f"function {getattr(self.function, '__name__', type(self.function).__name__)}"


def _are_numbers(*values: Any) -> bool:
    return all(type(value) in (int, float) and math.isfinite(value) for value in values)
