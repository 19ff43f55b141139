"""Equality of forms whose inputs are Python objects: naive's result by ``==``, and inputs left as they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..laws import NAIVE
from .comparing import Unequal
from .form_call import FormCall
from .reference import blaming_naive

_SHOWN = 80  # characters of a result in a message


def compare_objects(call: FormCall) -> None:
    """Raise ``Unequal`` where the form does not return what naive returns, or changes its inputs."""
    with blaming_naive():
        expected = _read(call.of(NAIVE).result(call.inputs("cpu")))
    inputs, fresh = call.inputs("cpu"), call.inputs("cpu")
    comparable = [name for name in inputs if are_same(inputs[name], fresh[name])]  # an open file equals no other
    result = _read(call.result(inputs))
    for name in comparable:
        if not are_same(inputs[name], fresh[name]):
            raise Unequal(f"writes into its input {name}")
    if isinstance(result, list) and isinstance(expected, list):
        _compare_items(result, expected)
    elif not are_same(result, expected):
        raise Unequal(f"returns {_shown(result)}, naive {_shown(expected)}")


def _compare_items(result: list[Any], expected: list[Any]) -> None:
    for number, (item, wanted) in enumerate(zip(result, expected, strict=False)):
        if not are_same(item, wanted):
            raise Unequal(f"item {number} is {_shown(item)}, naive's {_shown(wanted)}")
    if len(result) != len(expected):
        raise Unequal(f"returns {len(result)} items, naive {len(expected)}")


def are_same(one: Any, other: Any) -> bool:
    """Equal by ``==``; arrays and tensors by dtype, shape and values, a NaN equal to a NaN."""
    if hasattr(one, "__array__") and hasattr(other, "__array__"):
        same_kind = type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape
        return same_kind and bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and type(one) is type(other):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


def _read(result: Any) -> Any:
    return list(result) if isinstance(result, Iterator) else result


def _shown(value: Any) -> str:
    text = f"{len(value)} items" if isinstance(value, Sequence) and len(value) > _SHOWN else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
