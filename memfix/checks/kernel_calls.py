"""Choose calls for kernels until every two options have met in every kernel that a form can launch.

A call with two options tests only the kernels that it launches: a bias under a summed loss may be right where logits
are in memory, and wrong in a kernel that never stores them. To find out which kernels a call launches, its Python code
runs and the launches are skipped, which takes milliseconds.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import torch

from ..contract import Contract
from .draws import Drawn, Options, equality_draws, made, options_of, options_taken, pairs, usual_draws
from .form_call import FormCall, output_tensors
from .inputs import Draw
from .lowered import lowered_constants

Kernels = frozenset[str]
_NUM_DRAWN = 4  # calls of each kind and dtype in which kernels are looked for
_TRIES = 24
_CANDIDATES = 16
_LARGE = "large values"
_MAGNITUDES = {False: 1.0, True: 8.0}
_ONE_RESULT = "one result is used"


def calls_for_kernels(contract: Contract, form: str, given: Mapping[str, Sequence[Drawn]]) -> dict[str, list[Drawn]]:
    """Return the calls to compare beside the ``given`` ones, by dtype."""
    launches = _Launches(contract, form)
    compared = list(itertools.chain.from_iterable(given.values()))
    found = [*_drawn(contract, list(given)), *compared]
    number_of_calls = Counter(kernel for call in found for kernel in launches.of(call))
    more: dict[str, list[Drawn]] = {dtype: [] for dtype in given}
    # the rarest first: its calls launch the others, too
    for kernel in sorted(number_of_calls, key=lambda kernel: (number_of_calls[kernel], kernel)):
        start = [call for call in found if kernel in launches.of(call)][:_NUM_DRAWN]
        met = set().union(*(pairs(_taken(contract, call.draw)) for call in compared if kernel in launches.of(call)))
        for call in _calls_until_options_meet(contract, kernel, launches, start, met):
            more[call.draw.case.dtype].append(call)
            compared.append(call)
    return more


class _Launches:
    """A cache of the kernels that calls of a form launch."""

    def __init__(self, contract: Contract, form: str) -> None:
        self._contract, self._form = contract, form
        self._known: dict[str, Kernels] = {}

    def of(self, call: Drawn) -> Kernels:
        name = call.draw.spelled()
        if name not in self._known:
            self._known[name] = launched(self._contract, self._form, call.draw)
        return self._known[name]


def _calls_until_options_meet(
    contract: Contract, kernel: str, launches: _Launches, start: Sequence[Drawn], met: set[tuple[str, str]]
) -> Iterator[Drawn]:
    """Yield calls of ``start`` with other options: of several candidates the one in which most new pairs meet."""
    every = {**options_of(contract), _LARGE: (False, True), _ONE_RESULT: (False, True)}
    options: Options = {
        name: [value for value in values if kernel in launches.of(_with(contract, start[0], {name: value}))]
        for name, values in every.items()
    }
    to_meet, source = pairs(options) - met, Random(0)
    for call in itertools.islice(itertools.cycle(start), _TRIES):
        if not to_meet:
            return
        several = [{name: (source.choice(values),) for name, values in options.items()} for _ in range(_CANDIDATES)]
        best = max(several, key=lambda chosen: len(to_meet & pairs(chosen)))
        changed = _with(contract, call, {name: value for name, (value,) in best.items()})
        if kernel in launches.of(changed):
            to_meet -= pairs(_taken(contract, changed.draw))
            yield changed


def _drawn(contract: Contract, dtypes: Sequence[str]) -> Iterator[Drawn]:
    """Yield drawn calls of any kind, and some with the sizes and options that models have."""
    for dtype in dtypes:
        draws = equality_draws(contract, dtype)
        for kind in (draws, usual_draws(draws, contract)):
            yield from itertools.islice(made(kind, Random(0)), 1, 1 + _NUM_DRAWN)


def _taken(contract: Contract, draw: Draw) -> Options:
    beside = {_LARGE: (draw.magnitude > 4,), _ONE_RESULT: (draw.upstream == "partial",)}
    return {**options_taken(contract, draw), **beside}


def _with(contract: Contract, call: Drawn, chosen: Mapping[str, Any]) -> Drawn:
    return call.changed(partial(_changed, contract, chosen))


def _changed(contract: Contract, chosen: Mapping[str, Any], draw: Draw) -> Draw:
    taken = {**{name: value for name, (value,) in _taken(contract, draw).items()}, **chosen}
    choices = {name: taken[name] for name in contract.choices}
    present = tuple(spec.name for spec in contract.inputs if spec.optional and taken[spec.name])
    magnitude = _MAGNITUDES[chosen[_LARGE]] if _LARGE in chosen else draw.magnitude
    upstream = draw.upstream
    if taken[_ONE_RESULT] != (upstream == "partial"):
        upstream = "partial" if taken[_ONE_RESULT] else "dense"
    case = replace(draw.case, choices=choices, present=present)
    return replace(draw, case=case, magnitude=magnitude, upstream=upstream)


def launched(contract: Contract, form: str, draw: Draw) -> Kernels:
    """Return the kernels that a call launches. None of them runs, so the call's result is ignored."""
    from triton.runtime.interpreter import InterpretedFunction

    names: set[str] = set()

    def note(kernel: Any, *args: Any, **kwargs: Any) -> None:
        names.add(kernel.__name__)

    run, InterpretedFunction.run = InterpretedFunction.run, note
    try:
        with lowered_constants(contract, form):
            _call(contract, form, draw)
    except Exception:  # the same call fails later, when it is compared
        pass
    finally:
        InterpretedFunction.run = run
    return frozenset(names)


def _call(contract: Contract, form: str, draw: Draw) -> None:
    call = FormCall(contract, form, draw)
    outputs = [tensor for tensor in output_tensors(call.result(call.inputs("cpu"))) if tensor.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.zeros_like(output) for output in outputs])
