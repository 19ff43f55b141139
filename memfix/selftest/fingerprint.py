"""Fingerprints of a form: hashes of its results, and its bytes, at many more calls and shapes than the gate checks.

The verdict on a mutant that passes all checks comes from comparing its fingerprint with that of the unchanged form.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..checks.calls import SHARE
from ..checks.draws import drawn, equality_draws, memory_draws, usual
from ..checks.effort import Effort
from ..checks.equality import check_equality_at
from ..checks.form_call import FormCall
from ..checks.inputs import Draw
from ..checks.measuring import measure_phases, phases_beside
from ..checks.memory import bytes_of
from ..checks.plan import place_of
from ..checks.running import answer_at
from ..contract import Contract
from ..meters import get_meter

_TIMES_MORE = 2  # calls, as a multiple of those that the gate draws
_MOST_COMBINATIONS = 48
_LARGE = 100_000


@dataclass
class Fingerprint:
    """The hash of the result of each call, and the bytes of each phase at each shape; None where the form raised."""

    answers: dict[str, str | None] = field(default_factory=dict)
    bytes: dict[str, dict[str, int] | None] = field(default_factory=dict)
    is_whole: bool = True
    """Whether all calls and shapes were run before the time was over."""


def fingerprint_of(contract: Contract, form: str, effort: Effort, *, interpreted: bool, until: float) -> Fingerprint:
    """Run ``form`` with more shapes, more calls and all choices, until the time ``until`` (of ``time.monotonic``)."""
    found = Fingerprint()
    shapes = () if interpreted else more_shapes(contract, effort)
    is_run = contract.forms[form].is_interpreted == interpreted
    calls = more_calls(contract, effort, interpreted=interpreted) if is_run else ()
    asked = itertools.chain(((draw, True) for draw in shapes), ((draw, False) for draw in calls))
    for draw, is_measured in asked:
        if time.monotonic() > until:
            found.is_whole = False
            break
        if is_measured:
            found.bytes[draw.spelled()] = _bytes_at(contract, form, draw)
        else:
            found.answers[draw.spelled()] = _hash_at(contract, form, draw)
    return found


def more_calls(contract: Contract, effort: Effort, *, interpreted: bool) -> Iterator[Draw]:
    """Yield every combination of options in each dtype, calls that the gate does not draw, and two larger calls."""
    number = _TIMES_MORE * effort.equality_examples // (SHARE if interpreted else 1)
    plain = usual(equality_draws(contract, contract.dtypes[0]), contract).draw
    options = list(_combinations(contract))[: _MOST_COMBINATIONS // (SHARE if interpreted else 1)]
    for dtype, (choices, present) in itertools.product(contract.dtypes, options):
        yield replace(plain, case=replace(plain.case, dtype=dtype, choices=choices, present=present))
    others = drawn(equality_draws(contract, contract.dtypes[0]), contract, 2 + number)[2:]
    for dtype, call in itertools.product(contract.dtypes, others):
        yield replace(call.draw, case=replace(call.draw.case, dtype=dtype), seed=call.draw.seed + 7)
    for dtype in () if interpreted else (contract.dtypes[0], contract.dtypes[-1]):
        yield replace(plain, case=replace(plain.case, dtype=dtype, dims={**plain.case.dims, **_larger(contract)}))


def _larger(contract: Contract) -> dict[str, int]:
    """Return dims at their upper bounds, with the longest axis so large that an input exceeds ``_LARGE`` elements."""
    dims = {dim: spec.high for dim, spec in contract.dims.items()}
    longest = max(contract.shape_dims(), key=dims.__getitem__)
    specs = [spec for spec in contract.inputs if longest in spec.dims and spec.is_floating] or contract.inputs
    most = max(math.prod(spec.size(dims)) for spec in specs)
    return {**dims, longest: dims[longest] * (1 + _LARGE // max(1, most))}


def more_shapes(contract: Contract, effort: Effort) -> Iterator[Draw]:
    smallest = min(contract.cases.values(), key=lambda case: sum(case.dims.values()))
    for dtype, (choices, present) in itertools.product(contract.dtypes, list(_combinations(contract))[:12]):
        yield Draw(replace(smallest, choices=choices, present=present, dtype=dtype))
    for call in drawn(memory_draws(contract), contract, _TIMES_MORE * effort.memory_examples)[effort.memory_examples :]:
        yield call.draw


def _combinations(contract: Contract) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Yield every combination of choices with each set of optional inputs: none, each one alone, and all."""
    optional = [spec.name for spec in contract.inputs if spec.optional]
    presents = dict.fromkeys([(), *((name,) for name in optional), tuple(optional)])
    for values in itertools.product(*contract.choices.values()):
        for present in presents:
            yield dict(zip(contract.choices, values, strict=True)), present


def _hash_at(contract: Contract, form: str, draw: Draw) -> str | None:
    try:
        answer = answer_at(contract, form, draw)
    except Exception:
        return None
    made = hashlib.blake2b()
    for name, tensor in answer.tensors.items():
        made.update(f"{name} {tensor.dtype if tensor is not None else None}".encode())
        if tensor is not None:
            made.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return made.hexdigest()


def _bytes_at(contract: Contract, form: str, draw: Draw) -> dict[str, int] | None:
    call = FormCall(contract, form, draw)
    try:
        readings = measure_phases(call, [*call.phases, *phases_beside(call.phases)], get_meter("simulated"))
    except Exception:
        return None
    return {phase: bytes_of(reading, phase) for phase, reading in readings.items()}


def compare_fingerprints(contract: Contract, form: str, before: Fingerprint, now: Fingerprint) -> tuple[str, str]:
    """Return ``missed``, ``undecided`` or ``equal``, and why."""
    others = [call for call, answer in now.answers.items() if answer != before.answers.get(call, answer)]
    for call in others[:20]:
        draw, place = Draw.parsed(contract, call), place_of(contract, form, "cpu")
        if check_equality_at(contract, form, draw, place=place).status == "fail":
            return "missed", f"wrong at a call that the gate does not draw: {call}"
    small = 0
    for shape, sizes in now.bytes.items():
        was = before.bytes.get(shape) or {}
        for phase, size in was.items():
            grown = (sizes or was).get(phase, 0) - size
            if 1000 * grown > size:  # growth by less than a thousandth is not called missed
                what = f"takes {grown:,} bytes more in {phase}, which no budget or lock entry forbids"
                return "missed", f"{what}, at {shape}"
            small = max(small, grown)
    if small:
        return "undecided", f"takes {small:,} bytes more at some shapes, less than a thousandth"
    if others:
        return "undecided", f"other bits in {len(others)} of {len(now.answers)} calls, within the tolerance"
    if any(sizes != before.bytes.get(shape, sizes) for shape, sizes in now.bytes.items()):
        return "undecided", "takes fewer bytes at some shapes"
    calls, shapes = f"{len(now.answers)} more calls", f"{len(now.bytes)} more shapes"
    if not (before.is_whole and now.is_whole):
        return "undecided", f"the same at {calls} and {shapes}; then the time limit was reached"
    return "equal", f"the same bits in {calls} and the same bytes at {shapes}"
