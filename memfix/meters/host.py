"""The host meter: counts the bytes that Python, numpy and torch's CPU tensors take at the peak of a step.

tracemalloc counts what Python and numpy allocate. A dispatch mode counts the results of torch's operators on CPU
tensors, but not the temporaries inside their kernels. Other C libraries and child processes are not counted. As a
second opinion, a separate run reads the growth of the process's resident memory (``reserved_bytes``).

Counts depend on the version of Python, so they are checked against budgets and scaling laws, but not locked.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import platform
import sys
import sysconfig
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import MeasurementError, MeterUnavailable
from ..units import KiB, MiB, format_bytes
from .base import Reading, Step, StepBuilder
from .garbage import only_our_own_cycles
from .resident import PAGE_BYTES, resident_growth
from .timeline import METERS_FOLDER, Allocation, Line

if TYPE_CHECKING:
    from .host_tensors import CpuTensors

GRANULARITY_BYTES = 4 * KiB
"""The bytes that Python's own caches and free lists, and the measurement itself, may add to a count."""
_CONFIRM_A_LEAK = 4  # the most further calls to confirm that bytes which stay are a leak
_FRAMES = 4  # frames traced per allocation, to find the user's line behind a library's
_NEAR_PEAK = 0.95  # share of the peak at which the lines behind live blocks are looked up
_NUMPY_DOMAIN = 389047  # the tracemalloc domain of numpy's arrays
_UNCOUNTED = 16 * MiB  # a reading notes resident growth if it exceeds twice the counted peak by more than this
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_TENSORS = "torch's CPU tensors are counted operator by operator: temporaries inside their kernels are not"
_THREADS = "other threads of this process were running: what they allocated is counted too"
_RUNNING = "resident memory was not read: tracemalloc was running already, and its own tables are resident"


class HostMeter:
    """Counts with tracemalloc. Without ``lines``, readings lack ``alive_at_peak`` and take a third of the time."""

    name = "host"
    simulation = None

    def __init__(self, *, lines: bool = True) -> None:
        self._lines = lines

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("_tracemalloc") is None:
            return "this Python has no tracemalloc; use CPython"
        return None

    def capacity_bytes(self) -> None:
        """Return None, no limit: a step that does not fit raises a MemoryError."""

    def expecting(self, total_bytes: int) -> HostMeter:
        return self

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        """Run the step to warm up, for the peak, to confirm a leak, and for resident memory. To look up the lines
        behind the peak, build the step once more. If tracemalloc is already running, it is used and left running."""
        reason = self.unavailable_reason()
        if reason is not None:
            raise MeterUnavailable(f"host meter unavailable: {reason}")
        was_tracing = tracemalloc.is_tracing()
        if "torch" in sys.modules:
            from . import host_tensors  # noqa: F401  imported before tracing starts
        others = threading.active_count() > 1  # they are counted too: tracemalloc does not tell which thread allocates
        # automatic collections stay on, as without a meter: they decide how much garbage is alive at the peak
        with only_our_own_cycles(automatic=True):
            with _tracing(frames=1):  # the time of an allocation grows with the frames that are kept
                step = _warmed_up(build, warmup)
                counted = _count(step)
                left_bytes = counted.left_bytes
                for _ in range(_CONFIRM_A_LEAK):
                    if left_bytes >= GRANULARITY_BYTES:  # a leak grows at every call, a cache of Python's only at some
                        left_bytes = min(left_bytes, _count(step, for_leaks=True).left_bytes)
            growth = None if was_tracing else resident_growth(step)
            rows: tuple[Allocation, ...] = ()
            if self._lines:
                with _tracing(frames=_FRAMES):
                    rows = _count(_warmed_up(build, warmup), rows_near=counted.peak_bytes).rows
        resident_bytes = growth.bytes if growth else None
        notes = [note for note in (_RUNNING if growth is None else growth.note,) if note]
        doubts = [_TENSORS] * counted.has_tensors + [_THREADS] * others
        if resident_bytes is not None and resident_bytes > 2 * counted.peak_bytes + _UNCOUNTED:
            grown, pages = format_bytes(resident_bytes), format_bytes(PAGE_BYTES)
            doubts.append(f"resident memory grew by {grown} (pages of {pages}): C libraries took what is not counted")
        return Reading(
            meter=self.name,
            device=f"{platform.machine()} host",
            peak_bytes=counted.peak_bytes,
            base_bytes=counted.base_bytes,
            held_bytes=counted.held_bytes,
            leaked_bytes=left_bytes,
            allocated_bytes=counted.peak_bytes,
            reserved_bytes=resident_bytes,
            granularity_bytes=GRANULARITY_BYTES,
            exact=not doubts,
            notes=(*doubts, *notes),
            alive_at_peak=rows,
        )


@contextlib.contextmanager
def _tracing(frames: int) -> Iterator[None]:
    """Trace from before the step is built: when an untraced block is resized, tracemalloc counts all its bytes."""
    if tracemalloc.is_tracing():
        yield
        return
    tracemalloc.start(frames)
    try:
        yield
    finally:
        tracemalloc.stop()


def _warmed_up(build: StepBuilder, warmup: int) -> Step:
    """Build a step and run it as it will be counted: to follow tensors fills caches of Python's, such as that of
    attribute names."""
    step = build("cpu")
    for _ in range(warmup):
        _count(step)
    return step


@dataclass(frozen=True)
class _Counted:
    """The counts of one run of a step, above ``base_bytes``, which were live before it."""

    base_bytes: int
    peak_bytes: int
    held_bytes: int
    left_bytes: int
    has_tensors: bool
    rows: tuple[Allocation, ...]


def _count(step: Step, *, rows_near: int | None = None, for_leaks: bool = False) -> _Counted:
    """Run ``step`` once and count. ``rows_near`` is the peak of an earlier run, near which the lines are looked up.

    ``for_leaks`` clears Python's cache of type attributes before the run and after it. That cache keeps up to 4,096
    attribute names that C code, such as io's and torch's, looks up. It grows from call to call, but is no leak. In
    other runs it is part of the peak.
    """
    live = _LiveBytes()
    tensors = _follow_tensors(live)
    lookup = _Lookup(live, tensors, int(_NEAR_PEAK * rows_near)) if rows_near else None
    with tensors or contextlib.nullcontext(), lookup.installed() if lookup else contextlib.nullcontext():
        if for_leaks:
            _clear_type_cache()
        gc.collect()
        live.start()  # after the measurement has allocated its own objects
        result = step()
        if not tracemalloc.is_tracing():
            raise MeasurementError("the step stopped tracemalloc, by which the host meter counts; leave it running")
        held_bytes, peak_bytes = live.now(), live.peak()
        del result
        gc.collect()
        num_tensors = tensors.clear() if tensors is not None else 0
        if for_leaks:
            _clear_type_cache()
        gc.collect()  # empties Python's free lists
        left_bytes = live.now()
    return _Counted(live.base, peak_bytes, held_bytes, left_bytes, num_tensors > 0, lookup.rows if lookup else ())


_clear_type_cache: Callable[[], object] = getattr(sys, "_clear_internal_caches", None) or sys._clear_type_cache
"""Clears Python's cache of type attributes, by the name in Python 3.13 or the older one."""


def _follow_tensors(live: _LiveBytes) -> CpuTensors | None:
    if "torch" not in sys.modules:
        return None
    from .host_tensors import CpuTensors

    return CpuTensors(live.tensors_changed)


class _LiveBytes:
    """The live bytes of tracemalloc and of tensors together, above those at the start.

    Their joint peak is exact: between two changes the tensor bytes are constant, and tracemalloc keeps its own peak.
    """

    def __init__(self) -> None:
        self.base = sys.maxsize  # before the start, every count is below it
        self._tensor_bytes = self._peak = 0

    def start(self) -> None:
        self._tensor_bytes = self._peak = 0
        tracemalloc.reset_peak()
        self.base = tracemalloc.get_traced_memory()[0]

    @contextlib.contextmanager
    def not_counting(self) -> Iterator[None]:
        """Do not count what the block allocates and keeps: add it to the base."""
        before = tracemalloc.get_traced_memory()[0]
        yield
        gc.collect()
        self.base += tracemalloc.get_traced_memory()[0] - before

    def now(self) -> int:
        return tracemalloc.get_traced_memory()[0] - self.base + self._tensor_bytes

    def peak(self) -> int:
        since_last_event = tracemalloc.get_traced_memory()[1] - self.base + self._tensor_bytes
        return max(self._peak, since_last_event)

    def tensors_changed(self, size: int) -> None:
        self._peak = self.peak()
        tracemalloc.reset_peak()
        self._tensor_bytes += size


@dataclass
class _Lookup:
    """Looks up the lines behind live blocks, at this thread's first call or return with ``threshold`` bytes live."""

    live: _LiveBytes
    tensors: CpuTensors | None
    threshold: int
    rows: tuple[Allocation, ...] = ()
    _before: dict[tuple[str, Line | None], list[int]] = field(default_factory=dict)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        outer = sys.getprofile()
        self._before = _sums(None)
        sys.setprofile(self._look)
        try:
            yield
        finally:
            sys.setprofile(outer)

    def _look(self, *_event: Any) -> None:
        if self.live.now() >= self.threshold:
            sys.setprofile(None)
            with self.live.not_counting():
                self.rows = self._rows()

    def _rows(self) -> tuple[Allocation, ...]:
        rows = []
        for (what, line), (size, count) in _sums(self.tensors).items():
            before = self._before.get((what, line), (0, 0))
            place, code = (line.place, line.text) if line else ("", "")
            rows.append(Allocation(size - before[0], what, place, code, max(1, count - before[1])))
        return tuple(sorted((row for row in rows if row.bytes > 0), key=lambda row: (-row.bytes, row.what, row.place)))


def _sums(tensors: CpuTensors | None) -> dict[tuple[str, Line | None], list[int]]:
    """The bytes and the number of live blocks, by kind and line."""
    found: dict[tuple[str, Line | None], list[int]] = {}

    def add(what: str, line: Line | None, size: int) -> None:
        row = found.setdefault((what, line), [0, 0])
        row[0] += size
        row[1] += 1

    line_of = functools.cache(_user_line)
    # the raw tuples behind Snapshot.traces: making objects of a hundred thousand blocks takes seconds
    for domain, size, frames, *_ in tracemalloc.take_snapshot().traces._traces:  # type: ignore[attr-defined]
        line = line_of(frames)
        if line is not None:
            add("numpy array" if domain == _NUMPY_DOMAIN else "Python objects", line, size)
    if tensors is not None:
        for size, site in tensors.alive():
            add("CPU tensor", Line(site[0].co_filename, site[1], "") if site else None, size)
    return found


def _user_line(frames: tuple[tuple[str, int], ...]) -> Line | None:
    """The innermost line outside libraries, or else the innermost line; None for the meters' own allocations."""
    for file, number in frames:
        if file.startswith(METERS_FOLDER):
            return None
        if not file.startswith((*_LIBRARIES, "<")):
            return Line(file, number, "")
    return Line(*frames[0], "")
