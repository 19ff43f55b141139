"""Refuse the options of a ``TensorSpec`` that ``values=`` has replaced, and name their new spelling."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, TypeVar

from ..errors import ContractError
from .dtypes import INTEGER_DTYPES, WORKING
from .values import Cuts, Integers, LogUniform, Mask, Normal, Uniform, Values

_T = TypeVar("_T")
_OLD_OPTIONS = ("low", "high", "scale", "log_uniform", "cumulative", "fan_in")


def refuses_old_spelling(cls: type[_T]) -> type[_T]:
    """Decorate a class: its constructor refuses replaced options and says what to write instead."""
    init: Any = cls.__init__

    @functools.wraps(init)
    def __init__(self: _T, name: str, shape: str, dtype: str = WORKING, *others: Any, **given: Any) -> None:
        old = {option: given[option] for option in given if option in _OLD_OPTIONS}
        if old:
            spelled = ", ".join(f"{option}={value!r}" for option, value in old.items())
            raise ContractError(f"input {name!r}: {spelled} is spelled values={_spelled_now(dtype, old)}")
        init(self, name, shape, dtype, *others, **given)

    cls.__init__ = __init__  # type: ignore[assignment, method-assign]
    return cls


def _spelled_now(dtype: str, old: Mapping[str, Any]) -> Values | str:
    low, high = old.get("low"), old.get("high")
    if old.get("cumulative") is not None:
        return Cuts(old["cumulative"])
    if dtype == "bool":
        return Mask()
    if dtype in INTEGER_DTYPES:
        return "Integers(high)" if high is None else Integers(low or 0, high)
    if old.get("log_uniform"):
        return LogUniform(low or 0.0, high or 0.0)
    if low is None and high is None:
        return Normal(old.get("scale", 1.0), old.get("fan_in"))
    return Uniform(0.0 if low is None else low, 1.0 if high is None else high)
