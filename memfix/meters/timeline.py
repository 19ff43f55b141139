"""The timeline of a step: when each buffer was allocated and freed. Imports no torch."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..units import format_bytes

KEPT = ", kept for backward"
METERS_FOLDER = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")
"""The folder of the meters, whose lines are not the user's."""
_ALLOCATION_UNIT = 512


def rounded(num_bytes: int) -> int:
    """``num_bytes`` rounded up as PyTorch's caching allocator does."""
    return -(-num_bytes // _ALLOCATION_UNIT) * _ALLOCATION_UNIT


@dataclass(frozen=True, slots=True)
class Line:
    """A line of user code."""

    file: str
    number: int
    function: str

    @property
    def text(self) -> str:
        return linecache.getline(self.file, self.number).strip()

    @property
    def place(self) -> str:
        """``loss.py:41``: the path is relative to the working directory, or just the file's name outside it."""
        relative = os.path.relpath(self.file)
        return f"{relative if not relative.startswith('..') else os.path.basename(self.file)}:{self.number}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}" + (f"   {self.text[:70]}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """The lifetime of one buffer. Times are event numbers: it is alive from ``born`` until just before ``died``."""

    bytes: int
    what: str
    """The operator that made it: ``mm``, ``workspace of sort``, ``existed before``."""
    line: Line | None
    phase: str
    """The phase in which it was made: ``forward``, ``backward`` or ``optimizer``."""
    born: int
    """0 if it existed before the step."""
    died: int | None
    """None if it outlived the step."""


@dataclass(frozen=True)
class Timeline:
    """Every buffer of a step, in order of birth. Buffers that existed before the step come first."""

    buffers: tuple[Buffer, ...]
    num_events: int
    """The number of events, each the birth or death of a buffer. They are numbered from 1; 0 is before the step."""
    phases: tuple[tuple[int, str], ...]
    """The first event and the name of each phase (:attr:`Buffer.phase`). The first phase starts at event 0."""
    stages: tuple[tuple[int, str | None], ...] = ()
    """The first event and the name of each stage that the step named by :func:`memfix.meters.stages.stage`."""
    asides: frozenset[str] = frozenset()
    """The names of stages that do not belong to the step, such as trials whose results were dropped."""

    @functools.cached_property
    def base_bytes(self) -> int:
        return sum(buffer.bytes for buffer in self.buffers if buffer.born == 0)

    @functools.cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """All live bytes after each event, from 0 to ``num_events``."""
        changes = [0] * (self.num_events + 1)
        for buffer in self.buffers:
            changes[buffer.born] += buffer.bytes
            if buffer.died is not None:
                changes[buffer.died] -= buffer.bytes
        return tuple(itertools.accumulate(changes))

    @functools.cached_property
    def peak_event(self) -> int:
        """The first event at which live bytes are highest. With ``asides``, only the other stages count."""
        of_step = [span for span in self.stage_spans() if span[2] not in self.asides] if self.asides else []
        # a stage begins with what is live before its first event
        events = [event for start, end, _ in of_step for event in range(start - 1, end)] or range(self.num_events + 1)
        return max(events, key=self.live_bytes.__getitem__)

    @property
    def highest_bytes(self) -> int:
        """The most live bytes at any event, asides included."""
        return max(self.live_bytes)

    def alive_at(self, event: int) -> Iterator[Buffer]:
        return (b for b in self.buffers if b.born <= event and (b.died is None or b.died > event))

    def phase_spans(self) -> list[tuple[int, int, str]]:
        """The first event, the event after the last, and the name of each phase. A phase without events is empty."""
        return self._spans(self.phases)

    def stage_spans(self) -> list[tuple[int, int, str]]:
        """The first event, the event after the last, and the name of each stage."""
        return self._spans(self.stages)

    def _spans(self, starts: tuple[tuple[int, str | None], ...]) -> list[tuple[int, int, str]]:
        edges = [*starts, (self.num_events + 1, None)]
        return [(start, end, name) for (start, name), (end, _) in itertools.pairwise(edges) if name is not None]

    def before(self, event: int) -> Timeline:
        """The timeline of the step if it had ended before ``event``."""
        buffers = tuple(
            replace(buffer, died=None) if buffer.died is not None and buffer.died >= event else buffer
            for buffer in self.buffers
            if buffer.born < event
        )
        phases = tuple(phase for phase in self.phases if phase[0] < event)
        stages = tuple(stage for stage in self.stages if stage[0] < event)
        return Timeline(buffers, event - 1, phases, stages, self.asides)

    def with_sizes(self, size_of: Callable[[int], int]) -> Timeline:
        """The timeline with ``size_of(bytes)`` as the size of each buffer, for example rounded up by an allocator."""
        return replace(self, buffers=tuple(replace(buffer, bytes=size_of(buffer.bytes)) for buffer in self.buffers))

    def at_peak(self) -> tuple[Allocation, ...]:
        """The step's own allocations that are alive at the peak: a row for each operator and line, largest first."""
        return self.rows_at(self.peak_event)

    def rows_at(
        self, event: int, of: Callable[[Buffer], bool] = lambda buffer: True, *, with_base: bool = False
    ) -> tuple[Allocation, ...]:
        """The rows of :meth:`at_peak` at any event, for the buffers that ``of`` accepts.

        ``with_base`` adds what existed before the step.
        """
        phase_then = next(phase for start, phase in reversed(self.phases) if start <= event)
        sums: dict[tuple[str, Line | None], list[int]] = {}
        for buffer in self.alive_at(event):
            if (with_base or buffer.born) and of(buffer):
                kept = phase_then == "backward" and buffer.phase == "forward"
                row = sums.setdefault((buffer.what + (KEPT if kept else ""), buffer.line), [0, 0])
                row[0] += buffer.bytes
                row[1] += 1
        rows = [
            Allocation(size, what, f"{line.place} in {line.function}" if line else "", line.text if line else "", count)
            for (what, line), (size, count) in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.what, row.place)))


@dataclass(frozen=True)
class Allocation:
    """Live bytes with the operator that allocated them and the line of user code that called it."""

    bytes: int
    what: str
    place: str
    """``loss.py:41 in chunked_loss``"""
    code: str = ""
    """The text of that line."""
    count: int = 1

    @property
    def where(self) -> str:
        return self.place + (f"   {self.code[:70]}" if self.code else "")

    def __str__(self) -> str:
        folded = f"   ({self.count} x {format_bytes(self.bytes // self.count)})" if self.count > 1 else ""
        return f"{format_bytes(self.bytes):>12}  {self.what}   {self.where}{folded}".rstrip()


def table_lines(rows: Sequence[Allocation], most: int) -> list[str]:
    """A line for each of the first ``most`` rows, and one for the sum of the others."""
    lines = [str(row) for row in rows[:most]]
    rest = rows[most:]
    if rest:
        lines.append(f"{format_bytes(sum(row.bytes for row in rest)):>12}  in {len(rest)} smaller places")
    return lines
