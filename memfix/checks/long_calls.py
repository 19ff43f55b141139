"""Calls with one axis as long as in a model, and the others short.

Dims are drawn from small ranges, but cases are larger: a position that is rounded, a counter that overflows, or a fast
path for long inputs shows there only. One length is beyond what 8 bits count and bfloat16 holds exactly, the other
beyond what 16 bits count and float16 holds. Where the second makes large tensors, such as a quadratic map, it is left
out; otherwise it is taken twice, with the first value of every choice and with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..contract import Contract, Dim
from ..laws import NAIVE
from .draws import Drawn, name_of_draws
from .form_call import FormCall
from .inputs import Draw

LONG = "long"
"""The name of the case of such a call: naive may refuse it, since a contract promises only the ranges of its dims."""
_LENGTHS = (("bfloat16", 0, 384), ("float16", 384, 70_000))
"""Each length's dtype, the length that a call must exceed, and the most it has."""
_SHORT, _CHUNKS = 8, 3  # the size of the other axes, and the chunks of the long one where its dim allows so few
_MOST_BYTES = 16 << 20
_HALVED = 6  # how often a length is halved to see how naive's largest tensor grows
_FOUND: dict[str, list[Draw]] = {}


def long_calls(contract: Contract, dtype: str, simplest: Drawn) -> list[Drawn]:
    """Return the long calls in this dtype: each length has a dtype of its own."""
    if contract.has_objects:
        return []
    name = name_of_draws(contract, contract.naive, contract.cases, dtype)
    if name not in _FOUND:
        _FOUND[name] = [*_drawn(contract, dtype, simplest.draw)]
    return [simplest.changed(partial(_always, draw)) for draw in _FOUND[name]]


def _always(draw: Draw, other: Draw) -> Draw:
    return draw


def _drawn(contract: Contract, dtype: str, simplest: Draw) -> Iterator[Draw]:
    """Yield a draw for each axis and length that is longer than drawn dims, but not longer than in the cases."""
    for own, shorter, most in _LENGTHS:
        if dtype != (own if own in contract.dtypes else contract.dtypes[-1]):
            continue
        for axis in contract.shape_dims():
            length = min(most, max(case.dims[axis] for case in contract.cases.values()))
            if length <= max(shorter, contract.dims[axis].high):
                continue
            for which in (0, -1) if shorter and contract.choices else (0,):
                draw_at = partial(_draw, contract, dtype, simplest, axis, which)
                if not shorter or _fits(contract, draw_at, length):
                    yield draw_at(length)


def _draw(contract: Contract, dtype: str, simplest: Draw, axis: str, which: int, length: int) -> Draw:
    """Return the call with this axis of this length, and every choice's value with the index ``which``."""

    def size(name: str, dim: Dim) -> int:
        if name != axis:
            most = _SHORT if name in contract.shape_dims() else length // _CHUNKS
            return max(dim.low, min(dim.high, most) // dim.multiple_of * dim.multiple_of)
        return length // dim.multiple_of * dim.multiple_of

    dims = {name: size(name, dim) for name, dim in contract.dims.items()}
    choices = {name: values[which] for name, values in contract.choices.items()}
    return replace(simplest, case=replace(simplest.case, name=LONG, dims=dims, choices=choices, dtype=dtype))


def _fits(contract: Contract, draw_at: Callable[[int], Draw], length: int) -> bool:
    """Whether naive's largest tensor is small at this length, as it grows between two much shorter ones.

    The forward runs on the CPU: a simulation, or any backward, would start threads of autograd, after which this
    process cannot fork workers.
    """
    try:
        one, other = (
            _largest_bytes(FormCall(contract, NAIVE, draw_at(length >> fewer))) for fewer in (_HALVED + 1, _HALVED)
        )
    except Exception:  # naive may refuse what lies outside its ranges
        return False
    return other * max(1.0, other / one) ** _HALVED <= _MOST_BYTES


def _largest_bytes(call: FormCall) -> int:
    with torch.no_grad(), _Largest() as largest:
        call.result(call.inputs("cpu"))
    return largest.bytes


class _Largest(TorchDispatchMode):
    """Keeps the bytes of the largest tensor that an operator returns."""

    bytes = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = (tensor.nbytes for tensor in tree_leaves(result) if isinstance(tensor, torch.Tensor))
        self.bytes = max(self.bytes, *sizes, 0)
        return result
