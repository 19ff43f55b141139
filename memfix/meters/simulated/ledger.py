"""The book of live bytes: births, deaths and transient workspace, and the timeline they make.

Knows nothing of torch. Time is a count of events, so two runs of the same code give the same book.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..timeline import Allocation, Buffer, Line, Timeline

ALLOCATION_ROUNDING = 512  # the caching allocator's smallest unit


def rounded(count: int) -> int:
    return -(-count // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING


@dataclass(eq=False, slots=True)
class Entry:
    """One storage. ``born`` and ``died`` are events; what existed before the step has ``born == 0``."""

    bytes: int
    what: str
    site: object = None  # opaque to the ledger: where in the user's code it comes from
    stage: str = ""
    born: int = 0
    died: int | None = None


@dataclass
class _Mark:
    """The highest point of one way of counting bytes."""

    live: int = 0
    peak: int = 0
    base: int = 0


@dataclass
class Ledger:
    requested: _Mark = field(default_factory=_Mark)
    allocated: _Mark = field(default_factory=_Mark)
    entries: list[Entry] = field(default_factory=list)
    event: int = 0
    stages: list[tuple[int, str]] = field(default_factory=lambda: [(0, "forward")])
    marks: list[tuple[int, str | None]] = field(default_factory=list)
    _heir: tuple[Entry, Entry] | None = None

    # ---------------------------------------------------------------- what happens
    def enter(self, stage: str) -> None:
        """What happens from here on is part of ``stage``."""
        if self.stages[-1][1] != stage:
            self.stages.append((self.event + 1, stage))

    def mark(self, name: str | None) -> None:
        """What happens from here on the step itself calls ``name``."""
        self.settle()
        if not self.marks or self.marks[-1][1] != name:
            self.marks.append((self.event + 1, name))

    def birth(self, entry: Entry) -> None:
        """New bytes, from now on."""
        self.settle()
        self._open(entry)
        self._add(entry.bytes)
        self._note_peak()

    def birth_in_place_of(self, old: Entry, entry: Entry) -> None:
        """``entry`` would have been written over ``old``, were no mode active: it takes over the bytes if
        ``old`` dies next, and counts as new otherwise."""
        self.settle()
        self._open(entry)
        self._heir = (old, entry)

    def found(self, entry: Entry) -> None:
        """A storage seen for the first time that was there before: it raises the whole history."""
        self.entries.append(entry)
        self._add(entry.bytes)
        for mark, size in ((self.requested, entry.bytes), (self.allocated, rounded(entry.bytes))):
            mark.peak += size
            mark.base += size

    def death(self, entry: Entry) -> None:
        heir = self._heir[1] if self._heir is not None and self._heir[0] is entry else None
        if heir is None:
            self.settle()
        self._heir = None
        self.event += 1
        entry.died = self.event
        self._remove(entry.bytes)
        if heir is not None:
            heir.born = self.event
            self._add(heir.bytes)

    def resize(self, entry: Entry, size: int) -> None:
        self.settle()
        self.event += 1
        self.entries.append(replace(entry, died=self.event))  # what it was until now
        self._remove(entry.bytes)
        self._add(size)
        entry.bytes, entry.born = size, self.event
        self._note_peak()

    def workspace(self, buffers: Iterable[Entry]) -> None:
        """Bytes that a kernel takes and gives back before it returns."""
        buffers = tuple(buffers)
        self.event += 1
        for buffer in buffers:
            buffer.born, buffer.stage = self.event, self.stage
            self._add(buffer.bytes)
        self._note_peak()
        self.event += 1
        for buffer in buffers:
            buffer.died = self.event
            self._remove(buffer.bytes)
        self.entries += buffers

    def settle(self) -> None:
        """No death followed the last ``birth_in_place_of``: both are alive."""
        if self._heir is not None:
            _, entry = self._heir
            self._heir = None
            self._add(entry.bytes)
            self._note_peak()

    # ---------------------------------------------------------------- what is asked
    @property
    def stage(self) -> str:
        return self.stages[-1][1]

    def restart(self) -> None:
        """Measure from here: the base is what is live now, and what died before is forgotten."""
        self.settle()
        self.entries = [entry for entry in self.entries if entry.died is None]
        for entry in self.entries:
            entry.born = 0
        self.event, self.stages, self.marks = 0, [(0, "forward")], []
        for mark in (self.requested, self.allocated):
            mark.base = mark.peak = mark.live

    def timeline(self, line_of: Callable[[Any], Line | None] = lambda site: None) -> Timeline:
        """Everything since the restart. ``line_of`` reads an entry's site."""
        self.settle()
        ordered = sorted(self.entries, key=lambda entry: entry.born)
        return Timeline(_buffers(ordered, line_of), self.event, tuple(self.stages), tuple(self.marks))

    def left_behind(self, line_of: Callable[[Any], Line | None] = lambda site: None) -> tuple[Allocation, ...]:
        """What was made since the restart and is still alive."""
        self.settle()
        alive = _buffers([entry for entry in self.entries if entry.died is None], line_of)
        return Timeline(alive, self.event, ((0, ""),)).rows_at(self.event)

    # ---------------------------------------------------------------- bookkeeping
    def _open(self, entry: Entry) -> None:
        self.event += 1
        entry.born, entry.stage = self.event, self.stage
        self.entries.append(entry)

    def _add(self, size: int) -> None:
        self.requested.live += size
        self.allocated.live += rounded(size)

    def _remove(self, size: int) -> None:
        self.requested.live -= size
        self.allocated.live -= rounded(size)

    def _note_peak(self) -> None:
        for mark in (self.requested, self.allocated):
            if mark.live > mark.peak:
                mark.peak = mark.live


def _buffers(entries: Iterable[Entry], line_of: Callable[[Any], Line | None]) -> tuple[Buffer, ...]:
    line_of = functools.cache(line_of)
    return tuple(
        Buffer(entry.bytes, entry.what, line_of(entry.site), entry.stage, entry.born, entry.died)
        for entry in entries
        if entry.bytes
    )
