"""One timing process: it times the forms of one op, each against its copy at the base, naive, or itself slowed."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ...checks.children import take_one_core
from ...checks.form_call import StepOf
from ...checks.inputs import Draw
from ...contract import Contract
from ...errors import MeasurementError, MemfixError
from ...laws import NAIVE
from ...meters.base import Step
from ...meters.clock import Race, race, slowed
from ...meters.gpu_sharing import gpu_beside_others, gpu_to_ourselves
from ...orphans import ends_with_parent
from ...registry import contracts, source_of
from .import_base import NotAtBase, form_at_base
from .rule import CANARY_FACTOR, MOST_PAIRS, RACE_S, SAMPLE_S, SCATTER
from .timing_plan import Comparison, TimedForm

_PROCESSOR_FIELD = 36
"""The index of the CPU number among the fields after the process's name in ``/proc/self/stat``."""


@dataclass(frozen=True)
class WorkerConfig:
    """The op that a process times, the device, and the folder with the base's package.

    ``slower_by`` slows today's forms on purpose, each by a share: it tests the gate itself.
    """

    op: str
    device: str
    base: Path | None
    slower_by: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TimingResult:
    """One comparison in one process: a race, or the error that prevented it.

    ``is_new``: the base lacks the form. ``is_too_large``: the case takes too much time or memory here.
    """

    comparison: Comparison
    race: Race | None
    error: str = ""
    is_new: bool = False
    is_too_large: bool = False


@dataclass(frozen=True)
class TimingTask:
    """What a process times. With ``base_first`` the base is built and timed first, so that the order cancels out."""

    comparisons: tuple[Comparison, ...]
    base_first: bool

    def answers(self, contract: Contract, config: WorkerConfig) -> Iterator[TimingResult]:
        return (_timed(contract, comparison, config, self.base_first) for comparison in self.comparisons)


@dataclass(frozen=True)
class SizingTask:
    """Measures a step of the slowest of ``forms`` at each of ``sizes``."""

    sizes: tuple[TimedForm, ...]
    forms: tuple[str, ...]

    def answers(self, contract: Contract, config: WorkerConfig) -> Iterator[float | None]:
        """Yield the seconds at each size; None where a form refuses it."""
        self._seconds_at(self.sizes[0], contract, config.device)  # the first step loads libraries, fills caches
        return (self._seconds_at(timed, contract, config.device) for timed in self.sizes)

    def _seconds_at(self, timed: TimedForm, contract: Contract, device: str) -> float | None:
        draw, longest = Draw(timed.case_in(contract)), 0.0
        for form in self.forms:
            try:
                step = StepOf(contract, form, draw, timed.phase)(device)
                start = time.perf_counter()
                step()
            except Exception:
                return None
            longest = max(longest, time.perf_counter() - start)
        return longest


@ends_with_parent
def run_worker(connection: Connection, config: WorkerConfig, forms: Sequence[TimedForm]) -> None:
    """The process's main function: prepare ``forms``, report ready, take one task, send its answers one by one."""
    if config.device == "cpu":
        take_one_core()
    (contract,) = contracts([config.op])
    if config.device == "cuda":
        _warm_up_gpu(contract, forms, config.device)
    connection.send("ready")
    task: TimingTask | SizingTask = connection.recv()
    if config.device == "cuda":
        _stay_on_one_core()
    for answer in task.answers(contract, config):
        connection.send(answer)


def _warm_up_gpu(contract: Contract, forms: Sequence[TimedForm], device: str) -> None:
    """Run one small step of every form: the first one takes seconds, while torch and Triton load their libraries."""
    draw = Draw(contract.smallest_case)
    with gpu_beside_others():
        for form, phase in dict.fromkeys((timed.form, timed.phase) for timed in forms):
            with contextlib.suppress(Exception):  # reported when the form is timed
                StepOf(contract, form, draw, phase)(device)()


def _stay_on_one_core() -> None:
    """Pin every thread to the current core: a step that is bound by launches is then known to 1 % after a second
    instead of 4 % (kda's ``streamed`` on an H200)."""
    if not hasattr(os, "sched_setaffinity"):
        return
    core = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_PROCESSOR_FIELD])
    for thread in Path("/proc/self/task").iterdir():  # torch runs the backward in a thread of its own
        with contextlib.suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), {core})


def _timed(contract: Contract, comparison: Comparison, config: WorkerConfig, base_first: bool) -> TimingResult:
    device, (enough_s, most_s) = config.device, RACE_S[comparison.against]
    try:
        with gpu_to_ourselves() if device == "cuda" else contextlib.nullcontext():
            first, second = _steps(contract, comparison, config, base_first)
            result = race(
                first, second, device=device, pairs=MOST_PAIRS, sample_s=SAMPLE_S, enough_s=enough_s, most_s=most_s,
                max_error=SCATTER, second_begins=base_first,
            )  # fmt: skip
            return TimingResult(comparison, result)
    except NotAtBase as reason:
        return TimingResult(comparison, None, str(reason), is_new=True)
    except MemfixError as error:
        return TimingResult(comparison, None, str(error))
    except Exception as error:
        if isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error):  # torch's error on a CPU
            return TimingResult(comparison, None, "it needs more memory than there is", is_too_large=True)
        return TimingResult(comparison, None, f"{type(error).__name__}: {error}".splitlines()[0])


def _steps(contract: Contract, comparison: Comparison, config: WorkerConfig, base_first: bool) -> Sequence[Step]:
    """Return today's step and the one that it is compared with."""
    timed, against = comparison
    device, draw = config.device, Draw(timed.case_in(contract))

    def today() -> Step:
        step, share = StepOf(contract, timed.form, draw, timed.phase)(device), config.slower_by.get(timed.form)
        return slowed(step, 1 + share, device) if share else step

    def other() -> Step:
        if against == "base":
            with_base = contract.with_form("base", _function_at_base(contract, timed.form, config), like=timed.form)
            return StepOf(with_base, "base", draw, timed.phase)(device)
        return StepOf(contract, NAIVE if against == "naive" else timed.form, draw, timed.phase)(device)

    if base_first:
        second, first = other(), today()
    else:
        first, second = today(), other()
    return (slowed(first, CANARY_FACTOR, device) if against == "canary" else first), second


def _function_at_base(contract: Contract, form: str, config: WorkerConfig) -> Callable[..., Any]:
    assert config.base is not None
    function = form_at_base(config.base, source_of(contract.name), contract.name, form)
    if function is contract.function(form):
        raise MeasurementError(f"at both commits it is {function.__module__}.{function.__qualname__}, one and the same")
    return function
