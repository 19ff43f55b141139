"""The parts of a gate side by side, one process a core. What a real GPU's memory shows is measured by one process."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass

from ..checks.children import (
    StartMethod,
    import_what_equality_needs,
    import_what_meters_need,
    start_method,
    take_one_core,
)
from ..checks.effort import Effort, get_effort
from ..checks.examine import (
    Examination,
    Found,
    examine,
    examine_equality,
    examine_memory,
    examine_refusals,
    put_together,
)
from ..checks.interpreter import start_interpreter
from ..contract import Contract
from ..laws import NAIVE
from ..meters import get_meter
from ..meters.base import Meter
from ..meters.cuda import gpu_unavailable_reason
from ..registry import all_contracts

Say = Callable[[str], None]


@dataclass(frozen=True)
class Part:
    """A part of an op's examination. Plain data: it travels to a worker, and what was found comes back."""

    op: str
    kind: str
    forms: tuple[str, ...]
    dtypes: tuple[str, ...] = ()
    device: str = "cpu"
    """Where equality runs. Known before anything is simulated: meanwhile torch says that there is a GPU."""

    def examine(self, effort: Effort) -> Found:
        contract, found = all_contracts()[self.op], Found()
        if self.kind == "memory":
            for form in self.forms:
                found |= examine_memory(contract, form, get_meter("simulated"), effort)
        elif self.kind == "refusals":
            found |= examine_refusals(contract, self.forms)
        for dtype in self.dtypes:
            found |= examine_equality(contract, self.forms, dtype, effort, device=self.device)
        return found


def parts_of(contract: Contract, meter: Meter) -> Iterator[Part]:
    """Forms are held against the same calls in a dtype, so they stay together; but kernels of a real GPU are compiled
    for every call, which takes minutes, so each of them in each dtype is a part of its own.

    The memory of a real GPU is no part: one process measures it, and only of forms that were found equal.
    """
    kernels = tuple(name for name, form in contract.forms.items() if form.has_kernels)
    others = tuple(name for name in contract.forms if name not in kernels)
    if kernels and gpu_unavailable_reason() is None:
        for form, dtype in itertools.product(kernels, contract.dtypes):
            yield Part(contract.name, _COMPILED, (form,), (dtype,), device="cuda")
    elif kernels:
        yield Part(contract.name, _INTERPRETED, kernels, tuple(contract.dtypes))
    if others:
        for dtype in contract.dtypes:
            yield Part(contract.name, "equality", others, (dtype,))
    if meter.name == "simulated":
        unequal = contract.known_unequal_forms()
        for form in (NAIVE, *(form for form in contract.forms if form not in unequal)):
            yield Part(contract.name, "memory", (form,))
    yield Part(contract.name, "refusals", tuple(contract.forms))


def examine_all(contracts: Sequence[Contract], meter: Meter, effort: Effort, say: Say) -> list[Examination]:
    """Every check but speed of ``contracts``, in their order.

    A contract that is not the registry's own cannot be found in another process, and where little is asked a worker
    takes longer to start: these are examined here.
    """
    registered = all_contracts()
    travels = all(registered.get(c.name) is c for c in contracts)
    num_workers = os.cpu_count() or 1
    parts = [part for contract in contracts for part in parts_of(contract, meter)]
    if not travels or num_workers < 2 or len(parts) * effort.equality_examples < _WORTH_A_START:
        return [examine(contract, meter, effort, say) for contract in contracts]
    with _one_core():
        found = _examine_parts(parts, effort, min(num_workers, len(parts)), say)
    if meter.name != "simulated":
        for contract in contracts:
            for form in (NAIVE, *found[contract.name].equal_forms(contract, tuple(contract.forms))):
                found[contract.name] |= examine_memory(contract, form, meter, effort, say)
    return [put_together(contract, tuple(contract.forms), found[contract.name]) for contract in contracts]


def _examine_parts(parts: Sequence[Part], effort: Effort, num_workers: int, say: Say) -> dict[str, Found]:
    """What was found, by op."""
    registered = all_contracts()
    # what takes longest first, so that the last to end is not one that began late
    parts = sorted(parts, key=lambda part: (_ORDER.index(part.kind), -len(registered[part.op].forms)))
    waiting = Counter(part.op for part in parts)
    found = {op: Found() for op in waiting}
    method = start_method()
    if method == "fork":
        import_what_equality_needs()
    if any(part.kind == _INTERPRETED for part in parts):
        start_interpreter(method)  # before there are workers
    if method == "fork":
        import_what_meters_need()
        _draw_once(parts, effort)

    def note(op: str, part: Found) -> None:
        found[op] |= part
        waiting[op] -= 1
        if not waiting[op]:
            others = [name for name, number in waiting.items() if number]
            say(f"{op} is examined" + (f"; still at {', '.join(others)}" if others else ""))

    with (
        _started_pool(num_workers - 1, method) as workers,
        # kernels are interpreted in a child of this process, one after the other: it takes as long to start as to work
        ThreadPoolExecutor(1) as waiting_for_child,
    ):
        asked = {
            (waiting_for_child if part.kind == _INTERPRETED else workers).submit(_examine_part, part, effort.name): part
            for part in parts
        }
        for future, part in asked.items():  # this process is a worker too
            if part.kind not in (_INTERPRETED, _COMPILED) and future.cancel():
                say(f"{part.op}: {part.kind} of {', '.join(part.forms)}")
                note(part.op, part.examine(effort))
        for future in as_completed([future for future in asked if not future.cancelled()]):
            note(asked[future].op, future.result())
    return found


def _draw_once(parts: Sequence[Part], effort: Effort) -> None:
    """For all processes that are forked from this one: what is drawn is remembered."""
    from ..checks.equality import drawn_calls

    for op in {part.op for part in parts if part.kind == "equality"}:
        contract = all_contracts()[op]
        drawn_calls(contract, contract.dtypes[0], effort.equality_examples)


def _started_pool(num_workers: int, method: StartMethod) -> ProcessPoolExecutor:
    """Its processes are there, if they are forked, before this process has another thread."""
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context(method), initializer=take_one_core)
    pool.submit(os.getpid)
    return pool


@contextlib.contextmanager
def _one_core() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    take_one_core()
    try:
        yield
    finally:
        torch.set_num_threads(before)


_WORTH_A_START = 320  # parts times examples: about ten seconds of work, where a worker has begun after four
_INTERPRETED = "interpreted equality"
_COMPILED = "equality on the GPU"
_ORDER = (_INTERPRETED, _COMPILED, "memory", "equality", "refusals")


def _examine_part(part: Part, effort: str) -> Found:
    return part.examine(get_effort(effort))
