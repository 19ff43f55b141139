"""Small calls that differ in one option each: a choice, an optional input, a frozen input, a dtype that no case has.

A budget holds for all options, so it is generous for most, and what is wasted under one option alone may stay below
it. The lock has the exact bytes of every variant.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ..contract import Contract
from .inputs import Draw

_Plain = None | bool | int | float | str
"""Choices whose text is the same in every process."""


def variants(contract: Contract) -> dict[str, Draw]:
    """Return the variants of a contract by name, which says what differs as ``--at`` does; none where the memory is the
    host's, which is in no lock."""
    if contract.memory == "host":
        return {}
    return {name: replace(draw, case=replace(draw.case, name=name)) for name, draw in _variants(contract)}


def _variants(contract: Contract) -> Iterator[tuple[str, Draw]]:
    case = contract.smallest_case
    axes = contract.shape_dims()
    dims = {dim: _part(contract, dim, size, 4 if dim in axes else 2) for dim, size in case.dims.items()}
    plain = Draw(replace(case, dims=dims))
    for name, values in contract.choices.items():
        for value in values:
            if value != case.choices[name] and isinstance(value, _Plain):
                yield f"{name}={value}", _with(plain, choices={**case.choices, name: value})
    measured = {"float64", *(other.dtype for other in contract.cases.values())}
    yield from ((f"dtype={name}", _with(plain, dtype=name)) for name in contract.dtypes if name not in measured)
    for name in (spec.name for spec in contract.inputs if spec.optional):
        if name in case.present:
            yield f"absent={name}", _with(plain, present=tuple(other for other in case.present if other != name))
        else:
            yield f"present={name}", _with(plain, present=(*case.present, name))
    given = (spec for spec in contract.inputs if not spec.optional or spec.name in case.present)
    grads = [spec.name for spec in given if spec.grad]
    if len(grads) > 1:
        yield from ((f"frozen={name}", replace(plain, frozen=frozenset({name}))) for name in grads)


def _with(plain: Draw, **changed: Any) -> Draw:
    return replace(plain, case=replace(plain.case, **changed))


def _part(contract: Contract, dim: str, size: int, part: int) -> int:
    """Return a part of a case's size, so that a loop over tokens or chunks takes less time."""
    spec = contract.dims[dim]
    return max(spec.low, size // part // spec.multiple_of * spec.multiple_of)
