"""The gate's checks of one form in parts, as a mutant is asked them; and a harder look at one that passes them all."""

from __future__ import annotations

import hashlib
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..checks.effort import Effort
from ..checks.examine import put_together
from ..checks.finding import Finding
from ..checks.outcome import OneMeter, run_check, run_checks
from ..checks.plan import Found, Outcome, gate_plan, place_of
from ..contract import Contract
from ..gate.judge import judge_lock
from ..gate.lock import Key
from ..laws import NAIVE
from ..meters import get_meter

if TYPE_CHECKING:
    from ..checks.inputs import Draw

_MORE = 2  # times as many calls as the gate draws
_MOST_COMBINATIONS = 48
_LARGE = 100_000
_NOTHING = 1000  # bytes that grow by less than the thousandth part are not called missed


@dataclass(frozen=True)
class Part:
    """What is asked of one form at a time: calls that it must refuse, equality in one dtype, or its memory."""

    form: str
    kind: str
    dtype: str = ""


@dataclass
class Judge:
    """Asks parts of a contract. ``naive`` is naive's memory, which no mutant changes."""

    effort: Effort
    lock: Mapping[Key, int] | None
    naive: Found = field(default_factory=dict)

    def parts(self, contract: Contract, forms: Sequence[str], *, interpreted: bool) -> Iterator[Part]:
        for form in forms:
            if contract.forms[form].has_kernels == interpreted:
                yield from (Part(form, "equality", dtype) for dtype in contract.dtypes)
            if not interpreted:
                yield Part(form, "refusals")
                if not contract.forms[form].known_unequal:
                    yield Part(form, "memory")

    def findings(self, contract: Contract, part: Part) -> list[Finding]:
        """What the gate would say."""
        meter, form = get_meter("simulated"), part.form
        plan, tools = gate_plan(contract, meter, forms=[form], device="cpu"), OneMeter(meter, self.effort)
        if part.kind != "memory":
            kind = "bad input" if part.kind == "refusals" else part.kind
            asked = [check for check in plan if (check.kind, check.dtype) == (kind, part.dtype)]
            return [finding for check in asked for finding in run_check(check, contract, tools).findings]
        if not self.naive:
            self.naive = run_checks(contract, [check for check in plan if check.form == NAIVE], tools, {})
        passed = Outcome((Finding("equality", contract.name, form, "pass", ""),))
        found = {**self.naive, **{check: passed for check in plan if check.kind == "equality"}}
        measured = [check for check in plan if check.form == form and check.kind not in ("equality", "bad input")]
        examination = put_together(contract, plan, run_checks(contract, measured, tools, found))
        judged = list(examination.findings)
        if self.lock is not None:
            entries = {key: size for key, size in self.lock.items() if key[:2] in _locked(contract, form)}
            judged += judge_lock([examination], entries, {})
        return judged

    def first_failure(self, contract: Contract, parts: Sequence[Part]) -> Finding | None:
        for part in parts:
            for finding in self.findings(contract, part):
                if finding.status in ("fail", "error"):
                    return finding
        return None


def _locked(contract: Contract, form: str) -> list[tuple[str, str]]:
    return [(contract.name, NAIVE), (contract.name, form)]


# ---------------------------------------------------------------- a harder look
@dataclass(frozen=True)
class Look:
    """What a form gave on many more calls: the hash of every answer, the bytes of every phase; None where it raised."""

    answers: dict[str, str | None]
    bytes: dict[str, dict[str, int] | None]
    is_whole: bool = True
    """Was there time for all of it?"""


def look(contract: Contract, form: str, effort: Effort, *, interpreted: bool, until: float) -> Look:
    """Ask more shapes, more calls and all choices; ends at the time ``until`` with what it has."""
    answers: dict[str, str | None] = {}
    sizes: dict[str, dict[str, int] | None] = {}
    calls: Iterable[Draw] = ()
    shapes: Iterable[Draw] = ()
    if contract.forms[form].has_kernels == interpreted:
        calls = more_calls(contract, effort, interpreted=interpreted)
    if not interpreted:
        shapes = more_shapes(contract, effort)
    for draw in shapes:
        if time.monotonic() > until:
            return Look(answers, sizes, is_whole=False)
        sizes[draw.spelled()] = _bytes_at(contract, form, draw)
    for draw in calls:
        if time.monotonic() > until:
            return Look(answers, sizes, is_whole=False)
        answers[draw.spelled()] = _hash_of(contract, form, draw)
    return Look(answers, sizes)


def more_calls(contract: Contract, effort: Effort, *, interpreted: bool) -> Iterator[Draw]:
    """Every combination of options in each dtype, calls that the gate does not draw, and two larger ones."""
    from ..checks.calls import SHARE
    from ..checks.draws import drawn, equality_draws, usual

    number = _MORE * effort.equality_examples // (SHARE if interpreted else 1)
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
    """Dims as large as they are drawn, and the longest axis until an input has more than ``_LARGE`` elements."""
    dims = {dim: spec.high for dim, spec in contract.dims.items()}
    longest = max(contract.shape_dims(), key=dims.__getitem__)
    specs = [spec for spec in contract.inputs if longest in spec.dims and spec.is_floating] or contract.inputs
    most = max(math.prod(spec.size(dims)) for spec in specs)
    return {**dims, longest: dims[longest] * (1 + _LARGE // max(1, most))}


def more_shapes(contract: Contract, effort: Effort) -> Iterator[Draw]:
    from ..checks.draws import drawn, memory_draws
    from ..checks.inputs import Draw

    smallest = min(contract.cases.values(), key=lambda case: sum(case.dims.values()))
    for dtype, (choices, present) in itertools.product(contract.dtypes, list(_combinations(contract))[:12]):
        yield Draw(replace(smallest, choices=choices, present=present, dtype=dtype))
    for call in drawn(memory_draws(contract), contract, 2 * effort.memory_examples)[effort.memory_examples :]:
        yield call.draw


def _combinations(contract: Contract) -> Iterator[tuple[dict[str, Any], tuple[str, ...]]]:
    """Every value of every choice, with none and with each and with all of the optional inputs."""
    optional = [spec.name for spec in contract.inputs if spec.optional]
    presents = dict.fromkeys([(), *((name,) for name in optional), tuple(optional)])
    for values in itertools.product(*contract.choices.values()):
        for present in presents:
            yield dict(zip(contract.choices, values, strict=True)), present


def _hash_of(contract: Contract, form: str, draw: Draw) -> str | None:
    import torch

    from ..checks.running import answer_at

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
    from ..checks.inputs import phases_beside, phases_of
    from ..checks.memory import bytes_of, measure_phases

    phases = phases_of(contract)
    try:
        readings = measure_phases(contract, form, draw, [*phases, *phases_beside(phases)], get_meter("simulated"))
    except Exception:
        return None
    return {phase: bytes_of(reading, phase) for phase, reading in readings.items()}


def difference(contract: Contract, form: str, before: Look, now: Look) -> tuple[str, str]:
    """``missed``, ``undecided`` or ``equal``, and why."""
    from ..checks.equality import check_equality_at
    from ..checks.inputs import Draw

    others = [call for call, answer in now.answers.items() if answer != before.answers.get(call, answer)]
    for call in others[:20]:
        draw, place = Draw.parsed(contract, call), place_of(contract, form, "cpu")
        finding = check_equality_at(contract, form, draw, place=place)
        if finding.status == "fail":
            return "missed", f"wrong at a call that the gate does not draw: {call}"
    small = 0
    for shape, sizes in now.bytes.items():
        was = before.bytes.get(shape) or {}
        for phase, size in was.items():
            grown = (sizes or was).get(phase, 0) - size
            if grown > size / _NOTHING:
                what = f"takes {grown:,} bytes more in {phase}, which no budget or lock entry forbids"
                return "missed", f"{what}, at {shape}"
            small = max(small, grown)
    if small:
        return "undecided", f"takes {small:,} bytes more at some shapes, less than a thousandth"
    if others:
        return "undecided", f"other bits in {len(others)} of {len(now.answers)} calls, within the tolerance"
    if any(sizes != before.bytes.get(shape, sizes) for shape, sizes in now.bytes.items()):
        return "undecided", "takes fewer bytes at some shapes"
    if not (before.is_whole and now.is_whole):
        number = f"{len(now.answers)} more calls and {len(now.bytes)} more shapes"
        return "undecided", f"the same at {number}; then the time was over"
    return "equal", f"the same bits in {len(now.answers)} more calls and the same bytes at {len(now.bytes)} more shapes"
