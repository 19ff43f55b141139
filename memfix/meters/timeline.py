"""What happened to memory while a step ran, buffer by buffer. Imports no torch."""

from __future__ import annotations

import functools
import itertools
import linecache
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ..units import format_bytes


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
        """``loss.py:41``, with the path as short as it stays findable."""
        relative = os.path.relpath(self.file)
        return f"{relative if not relative.startswith('..') else os.path.basename(self.file)}:{self.number}"

    def __str__(self) -> str:
        return f"{self.place} in {self.function}" + (f"   {self.text[:70]}" if self.text else "")


@dataclass(frozen=True, slots=True)
class Buffer:
    """One buffer's life. Time is a count of births and deaths: it is there from ``born`` until before ``died``."""

    bytes: int
    what: str
    """The operator that made it: ``mm``, ``workspace of sort``, ``existed before``."""
    line: Line | None
    stage: str
    """``forward``, ``backward`` or ``optimizer``: when it was made."""
    born: int
    """0 where it existed before the step."""
    died: int | None
    """None where it outlived the step."""


@dataclass(frozen=True)
class Timeline:
    """Every buffer of a step, in order of birth, those that existed before it first."""

    buffers: tuple[Buffer, ...]
    num_events: int
    """Events are numbered from 1 to this; 0 is the moment before the step."""
    stages: tuple[tuple[int, str], ...]
    """From which event on which stage ran; the first starts at 0."""
    marks: tuple[tuple[int, str | None], ...] = ()
    """From which event on which part of the step ran, as the step itself says (:func:`memfix.meters.stages.stage`)."""

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
        """The first event at which live bytes are highest."""
        return max(range(self.num_events + 1), key=self.live_bytes.__getitem__)

    def alive_at(self, event: int) -> Iterator[Buffer]:
        return (b for b in self.buffers if b.born <= event and (b.died is None or b.died > event))

    def marked_spans(self) -> list[tuple[int, int, str]]:
        """First event, event after the last, name; an empty span is of a part in which no buffer came or went."""
        edges = [*self.marks, (self.num_events + 1, None)]
        return [(start, end, name) for (start, name), (end, _) in itertools.pairwise(edges) if name is not None]

    def before(self, event: int) -> Timeline:
        """As if the step had ended there: what came later has not happened, and nobody has died later."""
        buffers = tuple(
            replace(buffer, died=None) if buffer.died is not None and buffer.died >= event else buffer
            for buffer in self.buffers
            if buffer.born < event
        )
        stages = tuple(stage for stage in self.stages if stage[0] < event)
        return Timeline(buffers, event - 1, stages, tuple(mark for mark in self.marks if mark[0] < event))

    def with_sizes(self, size_of: Callable[[int], int]) -> Timeline:
        """Every buffer as large as an allocator makes it."""
        return replace(self, buffers=tuple(replace(buffer, bytes=size_of(buffer.bytes)) for buffer in self.buffers))

    def at_peak(self) -> tuple[Allocation, ...]:
        """What the step had made that was alive at the peak: one row for each maker and line, largest first."""
        return self.rows_at(self.peak_event)

    def rows_at(self, event: int, of: Callable[[Buffer], bool] = lambda buffer: True) -> tuple[Allocation, ...]:
        """The same at any event, and of some buffers only where asked."""
        stage_then = next(stage for start, stage in reversed(self.stages) if start <= event)
        sums: dict[tuple[str, Line | None], list[int]] = {}
        for buffer in self.alive_at(event):
            if buffer.born and of(buffer):
                kept = stage_then == "backward" and buffer.stage == "forward"
                row = sums.setdefault((buffer.what + (", kept for backward" if kept else ""), buffer.line), [0, 0])
                row[0] += buffer.bytes
                row[1] += 1
        rows = [
            Allocation(size, what, f"{line.place} in {line.function}" if line else "", line.text if line else "", count)
            for (what, line), (size, count) in sums.items()
        ]
        return tuple(sorted(rows, key=lambda row: (-row.bytes, row.what, row.place)))


@dataclass(frozen=True)
class Allocation:
    """Bytes that were alive at the peak: what made them, and the line of user code behind it."""

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
        return f"{format_bytes(self.bytes):>12}  {self.what}   {self.where}{folded}"
