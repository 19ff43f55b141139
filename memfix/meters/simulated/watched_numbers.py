"""Numbers that Python code gets for unknown values, which record the outcome of every comparison.

A step is measured under a few assumed numbers, and these may all be on one side of a limit with which the step
compares them. A reading is therefore exact only if every comparison was seen to come out both ways, with the same
bytes. ``Tensor.item`` and ``Tensor.tolist`` return watched numbers, arithmetic with them gives watched numbers, and
outcomes that were only seen one way are reversed in a further run. ``float(tensor)``, ``int(number)``, text, numpy and
most functions of ``math`` give plain numbers.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .patches import Patch

Place = Any
"""Where an outcome was decided: a code object and an offset in its bytecode, or a line that read a flag."""

_MOST_TURNED = 64
"""Outcomes that are turned round at one place; a loop may wait for another one."""


class Outcomes:
    """The outcomes of one run, by place."""

    def __init__(self) -> None:
        self.seen: dict[Place, set[bool]] = {}
        self.turned: frozenset[Place] = frozenset()
        """The places where every outcome is turned round."""
        self._num_turned: Counter[Place] = Counter()

    def decided(self, place: Place, outcome: bool) -> bool:
        """Record an outcome, reversed if the place is in ``turned``, and return it."""
        if place in self.turned and self._num_turned[place] < _MOST_TURNED:
            self._num_turned[place] += 1
            outcome = not outcome
        self.seen.setdefault(place, set()).add(outcome)
        return outcome

    def one_sided(self) -> frozenset[Place]:
        """The places that had only one outcome."""
        return frozenset(place for place, outcomes in self.seen.items() if len(outcomes) == 1)

    @staticmethod
    def together(several: Iterable[Outcomes]) -> Outcomes:
        """The outcomes of several runs."""
        found = Outcomes()
        for each in several:
            for place, outcomes in each.seen.items():
                found.seen.setdefault(place, set()).update(outcomes)
        return found

    def copy(self) -> Outcomes:
        """These outcomes, without those that follow."""
        copied = Outcomes.together([self])
        copied.turned = self.turned
        return copied


_outcomes: Outcomes | None = None
"""Those of the running simulation."""


def patches(outcomes: Outcomes) -> list[Patch]:
    """Record outcomes there, also those of functions that ask what kind of number it is."""
    kinds = ("isnan", "isinf", "isfinite")
    return [
        (sys.modules[__name__], "_outcomes", outcomes),
        *((math, name, _question(getattr(math, name))) for name in kinds),
    ]


def watching(real: Callable[[torch.Tensor], Any], is_assumed: Callable[[torch.Tensor], bool]) -> Callable[..., Any]:
    """A method that reads a tensor as ``real`` does, and returns watched numbers where ``is_assumed``."""

    def read(tensor: torch.Tensor) -> Any:
        return _watched(real(tensor)) if is_assumed(tensor) else real(tensor)

    return read


def _question(real: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def ask(number: Any) -> bool:
        outcome = real(number)
        return _decided(outcome) if isinstance(number, (WatchedFloat, WatchedInt)) else outcome

    return ask


def _decided(outcome: bool) -> bool:
    """The outcome, recorded for the place that called our caller."""
    if _outcomes is None:
        return outcome
    frame = sys._getframe(2)
    return _outcomes.decided((frame.f_code, frame.f_lasti), outcome)


def _watched(value: Any) -> Any:
    if type(value) is float:
        return WatchedFloat(value)
    if type(value) is int:
        return WatchedInt(value)
    return [_watched(part) for part in value] if isinstance(value, list) else value


def _comparison(kind: type, name: str) -> Callable[..., Any]:
    real = getattr(kind, name)

    def compare(self: Any, *other: Any) -> Any:
        outcome = real(self, *other)
        if outcome is NotImplemented and isinstance(other[0], float):
            outcome = getattr(float, name)(float(self), other[0])
        return outcome if outcome is NotImplemented else _decided(outcome)

    return compare


def _arithmetic(kind: type, name: str) -> Callable[..., Any]:
    real = getattr(kind, name)

    def compute(self: Any, *others: Any) -> Any:
        result = real(self, *others)
        if result is NotImplemented and isinstance(others[0], float):
            result = getattr(float, name)(float(self), *others)
        return _watched(result)

    return compute


_COMPARISONS = """__lt__ __le__ __gt__ __ge__ __eq__ __ne__ __bool__""".split()
_ARITHMETIC = """__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __floordiv__ __rfloordiv__
__mod__ __rmod__ __pow__ __rpow__ __neg__ __pos__ __abs__ __round__ __floor__ __ceil__ __trunc__""".split()


def _methods(kind: type) -> dict[str, Any]:
    compared = {name: _comparison(kind, name) for name in _COMPARISONS}
    computed = {name: _arithmetic(kind, name) for name in _ARITHMETIC}
    return {**compared, **computed, "__hash__": kind.__hash__, "__slots__": ()}


WatchedFloat = type("WatchedFloat", (float,), _methods(float))
WatchedInt = type("WatchedInt", (int,), _methods(int))
