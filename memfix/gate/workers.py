"""Run the checks of a gate in parallel, one process for each core."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock

from ..checks.children import StartMethod, one_core, start_method, start_worker
from ..checks.effort import Effort, get_effort
from ..checks.examine import Examination, Found, Tools, examine, is_due, put_together, run_check, run_checks
from ..checks.interpreter import start_interpreter
from ..checks.plan import Check, gate_plan
from ..checks.preload import import_for_equality, import_for_meters
from ..contract import Contract
from ..meters import get_meter
from ..meters.base import Meter
from ..progress import Say
from ..registry import all_contracts


@dataclass(frozen=True)
class Batch:
    """Checks of one op that one process runs in turn. A batch is pickled to a worker, and what it found back."""

    op: str
    kind: str
    checks: tuple[Check, ...]
    meter: str = "simulated"

    @property
    def forms(self) -> list[str]:
        return list(dict.fromkeys(check.form for check in self.checks))

    def run(self, effort: Effort) -> Found:
        contract, tools = all_contracts()[self.op], Tools(get_meter(self.meter), effort)
        if tools.meter.simulation is None:  # examine_all chose the checks that are due
            return {check: run_check(check, contract, tools) for check in self.checks}
        return run_checks(contract, self.checks, tools, {})


def batches_of(checks: Iterable[Check], meter: str = "simulated") -> list[Batch]:
    """Group checks into batches. Forms stay together, since they are compared at the same calls in a dtype. Kernels on
    a real GPU are compiled for every call, which takes minutes: each form in each dtype is a batch of its own.
    """
    batches: dict[tuple[str, ...], list[Check]] = {}
    for check in checks:
        batches.setdefault((check.op, *_batch_of(check)), []).append(check)
    return [Batch(op, kind, tuple(several), meter) for (op, kind, *_), several in batches.items()]


def _batch_of(check: Check) -> tuple[str, ...]:
    """Return the kind of a check's batch, and what distinguishes the batch from others of its kind."""
    if check.kind == "bad input":
        return ("bad inputs",)
    if check.kind != "equality":
        return ("memory", check.form)
    if check.place == "interpreter":
        return (_INTERPRETED,)
    return (_COMPILED, check.form, check.dtype) if check.place == "cuda" else ("equality", check.dtype)


def examine_all(contracts: Sequence[Contract], meter: Meter, effort: Effort, say: Say) -> list[Examination]:
    """Run every check but speed of ``contracts``; return their examinations in the same order.

    All run in this process if a contract is not the registry's own, which workers could not find, or if there is less
    to do than it takes to start workers.
    """
    registered = all_contracts()
    travels = all(registered.get(c.name) is c for c in contracts)
    num_workers = os.cpu_count() or 1
    plans = {contract.name: gate_plan(contract, meter) for contract in contracts}
    every = [check for plan in plans.values() for check in plan]
    # a real GPU measures only what was found equal
    is_later = {check: meter.simulation is None and check.kind == "memory" for check in every}
    batches = batches_of(check for check in every if not is_later[check])
    if not travels or num_workers < 2 or len(batches) * effort.equality_examples < _WORTH_A_START:
        return [examine(contract, meter, effort, say) for contract in contracts]
    with one_core():
        found = _run_batches(batches, effort, min(num_workers, len(batches)), say)
        later = (check for check in every if is_later[check])
        due = [check for check in later if is_due(check, registered[check.op], meter, found[check.op])]
        measured = _run_batches(batches_of(due, meter.name), effort, min(num_workers, _MOST_ON_A_GPU), say)
    for op, more in measured.items():
        found[op] |= more
    return [put_together(contract, plans[contract.name], found[contract.name]) for contract in contracts]


def _run_batches(batches: Sequence[Batch], effort: Effort, num_workers: int, say: Say) -> dict[str, Found]:
    """Run all batches; return what was found, by op."""
    if not batches:
        return {}
    registered = all_contracts()
    # the longest first, so that none of them begins late and ends last
    batches = sorted(batches, key=lambda batch: (_ORDER.index(batch.kind), -len(registered[batch.op].forms)))
    collected = _Collected(batches, say)
    method = _prepare_processes(batches, effort)
    answers: SimpleQueue[tuple[Batch, Future[Found] | None]] = SimpleQueue()
    lost: list[Batch] = []
    left = _Left([batch for batch in batches if batch.kind != _INTERPRETED])

    def ask(pool: Executor, batch: Batch, then: Callable[[], None] = lambda: None) -> None:
        def answered(future: Future[Found]) -> None:
            answers.put((batch, future))
            then()

        try:
            pool.submit(_run_batch, batch, effort.name).add_done_callback(answered)
        except BrokenExecutor:
            answers.put((batch, None))

    with (
        _started_pool(num_workers - 1, method) as workers,
        # kernels are interpreted in turn, in one child of this process: it takes as long to start as to work
        ThreadPoolExecutor(1) as waiting_for_child,
    ):

        def ask_worker() -> None:  # one batch at a time, so that this process may run the rest itself
            if (batch := left.next()) is not None:
                ask(workers, batch, then=ask_worker)

        for _ in range(num_workers):  # one more batch than workers, so that no worker waits for this process
            ask_worker()
        for batch in batches:
            if batch.kind == _INTERPRETED:
                ask(waiting_for_child, batch)
        for _ in batches:
            own = left.next(_fits_here)
            if own is not None:
                say(f"{own.op}: {own.kind} of {', '.join(own.forms)}")
                collected.add(own.op, own.run(effort))
            else:
                batch, future = answers.get()
                if (answer := _found_by(future)) is None:
                    lost.append(batch)
                else:
                    collected.add(batch.op, answer)
    for batch in lost:
        say(f"{batch.op}: {batch.kind} here, because a worker was lost")
        collected.add(batch.op, batch.run(effort))
    return collected.found


def _prepare_processes(batches: Sequence[Batch], effort: Effort) -> StartMethod:
    """Prepare this process before its first worker starts; return how workers are started."""
    method = start_method()
    if method == "fork":
        import_for_equality()
    if any(batch.kind == _INTERPRETED for batch in batches):
        start_interpreter(method)
    if method == "fork":
        import_for_meters()
        _draw_once(batches, effort)
    return method


class _Collected:
    """Collects what was found, by op, and reports when the last batch of an op has ended."""

    def __init__(self, batches: Sequence[Batch], say: Say) -> None:
        self._waiting = Counter(batch.op for batch in batches)
        self._say = say
        self.found: dict[str, Found] = {op: {} for op in self._waiting}

    def add(self, op: str, more: Found) -> None:
        self.found[op] |= more
        self._waiting[op] -= 1
        if not self._waiting[op]:
            others = [name for name, number in self._waiting.items() if number]
            self._say(f"{op} is examined" + (f"; still at {', '.join(others)}" if others else ""))


class _Left:
    """The batches that no process has begun, in order."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = list(batches)
        self._lock = Lock()

    def next(self, fits: Callable[[Batch], bool] = lambda batch: True) -> Batch | None:
        with self._lock:
            place = next((place for place, batch in enumerate(self._batches) if fits(batch)), None)
            return None if place is None else self._batches.pop(place)


def _fits_here(batch: Batch) -> bool:
    """Whether the process that waits for workers may run a batch itself: not on a GPU, which it would have to share,
    nor on the host meter, which would count its threads too."""
    on_host = batch.kind == "memory" and all_contracts()[batch.op].memory == "host"
    return batch.kind != _COMPILED and batch.meter == "simulated" and not on_host


def _found_by(future: Future[Found] | None) -> Found | None:
    """Return what a worker found; None if it was killed or its answer was unreadable, which breaks the whole pool."""
    try:
        return None if future is None else future.result()
    except BrokenExecutor:
        return None


def _draw_once(batches: Sequence[Batch], effort: Effort) -> None:
    """Draw the calls before this process forks, so that its children have them in the cache."""
    from ..checks.calls import drawn_calls

    for op in {batch.op for batch in batches if batch.kind == "equality"}:
        contract = all_contracts()[op]
        drawn_calls(contract, contract.dtypes[0], effort.equality_examples)


def _started_pool(num_workers: int, method: StartMethod) -> ProcessPoolExecutor:
    """Return a pool whose processes, if forked, exist before this process has another thread."""
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(num_workers, context, initializer=start_worker, initargs=(num_workers + 1,))
    pool.submit(os.getpid)
    return pool


_WORTH_A_START = 320  # batches times examples: about ten seconds of work, where a worker has begun after four
_MOST_ON_A_GPU = 16  # processes that measure on one: each keeps half a GiB of it for its context
_INTERPRETED = "interpreted equality"
_COMPILED = "equality on the GPU"
_ORDER = (_INTERPRETED, _COMPILED, "memory", "equality", "bad inputs")


def _run_batch(batch: Batch, effort: str) -> Found:
    return batch.run(get_effort(effort))
