"""Choose the calls at which a form is compared: the same for all forms of an op, and further ones for kernels."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from ..contract import Contract
from .draws import Drawn, drawn, equality_draws, in_mode, name_of_draws, spoiled, usual, usual_draws
from .inputs import AUTOCASTS, WITHOUT_GRAPH
from .kernel_calls import calls_for_kernels
from .long_calls import long_calls

Place = Literal["cpu", "cuda", "interpreter"]
"""Where a form runs while it is compared. In the interpreter the tensors are on the CPU."""
SHARE, LEAST = 8, 4
"""Interpreted kernels are hundreds of times slower: one call is drawn for ``SHARE`` examples, at least ``LEAST``."""

_DRAWN: dict[str, list[Drawn]] = {}
_FOR_KERNELS: dict[tuple[str, str], dict[str, list[Drawn]]] = {}


def equality_calls(
    contract: Contract, form: str, dtype: str, examples: int, *, place: Place = "cpu", seed: int = 0
) -> list[Drawn]:
    """Return the calls at which ``form`` is compared in ``dtype``.

    On a CPU, forms without kernels are compared at all drawn calls and emulated kernels at half of them. On a GPU,
    forms without kernels are compared at half, and kernels at a third, because most calls compile new ones. Interpreted
    kernels are compared at fewer drawn calls, and at others until every two options have met in every kernel. Long
    calls are for all but interpreted and emulated kernels.
    """
    if place == "interpreter":
        examples = max(LEAST, examples // SHARE)
        calls = drawn_calls(contract, dtype, examples, seed=seed)
        return calls + _calls_for_kernels(contract, form, examples, seed).get(dtype, [])
    has_kernels = contract.forms[form].has_kernels
    if place == "cuda" or has_kernels:
        examples = max(LEAST, examples // (3 if place == "cuda" and has_kernels else 2))
    calls = drawn_calls(contract, dtype, examples, seed=seed)
    return calls if has_kernels and place == "cpu" else [*calls, *long_calls(contract, dtype, calls[0])]


def drawn_calls(contract: Contract, dtype: str, examples: int, *, seed: int = 0) -> list[Drawn]:
    """Return the simplest call and a usual one, the same in every dtype, and others that differ between dtypes: an
    error of an option shows in any dtype. Further calls run without a graph; and, each kind in one dtype, have a NaN in
    one input, run under autocast, or are differentiated twice.

    The calls are the same for every form. They are drawn once and cached.
    """
    draws, num_others = equality_draws(contract, dtype), max(0, examples - 2)
    name = name_of_draws(contract, examples, seed)
    if name not in _DRAWN:
        several = drawn(draws, contract, 1 + num_others * len(contract.dtypes), seed=seed)
        _DRAWN[name] = [*several, usual(draws, contract, seed=seed)]
    simplest, *others, the_usual = _DRAWN[name]
    start = contract.dtypes.index(dtype) * num_others if dtype in contract.dtypes else 0
    plain = [(call, draws) for call in (simplest, *others[start : start + num_others])]
    calls = [*plain, (the_usual, usual_draws(draws, contract))][:examples]
    made = [
        Drawn(replace(call.draw, case=replace(call.draw.case, dtype=dtype)), call.made_of, its_draws)
        for call, its_draws in calls
    ]
    return [*made, *_special_calls(contract, dtype, made)]


def _special_calls(contract: Contract, dtype: str, made: Sequence[Drawn]) -> Iterator[Drawn]:
    """Yield calls without a graph in every dtype, and calls whose outcome does not depend on the dtype, each kind in
    one: a NaN in one input in the last dtype, autocast in float32, and second derivatives in float64, which has most
    digits.
    """
    if contract.has_objects:
        return
    dtypes, has_gradients = contract.dtypes, any(spec.grad for spec in contract.inputs)
    few, some, more = (made[1 : 1 + len(made) // part] or made[:1] for part in (10, 6, 3))
    if has_gradients:
        start = dtypes.index(dtype) if dtype in dtypes else 0
        yield from (in_mode(call, contract, WITHOUT_GRAPH[number % 2]) for number, call in enumerate(few, start))
    if dtype == dtypes[-1]:
        floating = [spec for spec in contract.inputs if spec.is_floating]
        yield from (call for spec in floating for call in spoiled(made[0], contract, spec))
    if dtype == "float32":
        modes = itertools.cycle(AUTOCASTS)
        yield from (in_mode(call, contract, mode) for call, mode in zip(more, modes, strict=False))
    if dtype == ("float64" if "float64" in dtypes else dtypes[-1]) and has_gradients:
        yield from (in_mode(call, contract, "twice") for call in some)


def _calls_for_kernels(contract: Contract, form: str, examples: int, seed: int) -> dict[str, list[Drawn]]:
    name = (form, name_of_draws(contract, examples, seed))
    if name not in _FOR_KERNELS:
        given = {dtype: drawn_calls(contract, dtype, examples, seed=seed) for dtype in contract.dtypes}
        _FOR_KERNELS[name] = calls_for_kernels(contract, form, given)
    return _FOR_KERNELS[name]
