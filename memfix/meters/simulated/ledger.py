"""The ledger of live bytes: records allocations, frees and transient workspace, and makes a timeline of them.

It imports no torch. Time is a count of events, so two runs of the same code give the same ledger.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ..timeline import Allocation, Buffer, Line, Timeline, rounded


@dataclass(eq=False, slots=True)
class Entry:
    """One storage or workspace buffer. ``born`` and ``died`` are event numbers; ``born`` is 0 before the step."""

    bytes: int
    what: str
    site: object = None  # the place in the user's code that allocated it; opaque to the ledger
    phase: str = ""
    born: int = 0
    died: int | None = None
    freed_late: str | None = None
    """Why its memory may be freed only some time after its last reference; None if it is freed with that."""


@dataclass
class _Count:
    """Bytes counted in one way, requested or rounded: live now, at the peak, and before the step (``base``)."""

    live: int = 0
    peak: int = 0
    base: int = 0
    least_peak: int = 0
    """The peak if every workspace of estimated size had its least size; ``most_peak``: its largest."""
    most_peak: int = 0

    def add_before(self, size: int) -> None:
        """Count bytes that existed before the step."""
        self.live += size
        self.base += size
        self.peak, self.least_peak, self.most_peak = self.peak + size, self.least_peak + size, self.most_peak + size

    def restart(self) -> None:
        self.base = self.peak = self.least_peak = self.most_peak = self.live

    def note_peak(self) -> None:
        if self.live > self.least_peak:
            self.least_peak = self.live
            self.most_peak = max(self.most_peak, self.live)
            self.peak = max(self.peak, self.live)

    def note_estimate(self, least: int, usual: int, most: int) -> None:
        """Raise the peaks by a workspace that is freed at once. Its size lies between ``least`` and ``most``."""
        self.least_peak = max(self.least_peak, self.live + least)
        self.peak = max(self.peak, self.live + usual)
        self.most_peak = max(self.most_peak, self.live + most)


@dataclass
class Ledger:
    requested: _Count = field(default_factory=_Count)
    allocated: _Count = field(default_factory=_Count)
    entries: list[Entry] = field(default_factory=list)
    event: int = 0
    phases: list[tuple[int, str]] = field(default_factory=lambda: [(0, "forward")])
    stages: list[tuple[int, str | None]] = field(default_factory=list)
    late_births: str | None = None
    """Why memory that is allocated in backward may be freed late; None if it is not."""
    late_peak: int = 0
    """The peak if what may be freed late is freed as late as possible, and ``late_reasons``, why it may be."""
    late_reasons: frozenset[str] = frozenset()
    _late: Counter[str] = field(default_factory=Counter)
    _marked: defaultdict[str, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    _heir: tuple[Entry, Entry] | None = None

    # ---------------------------------------------------------------- recording
    def enter_phase(self, name: str) -> None:
        """Begin a phase: ``forward``, ``backward`` or ``optimizer``."""
        if self.phases[-1][1] != name:
            self.phases.append((self.event + 1, name))

    def enter_stage(self, name: str | None) -> None:
        """Begin a stage that the step names itself."""
        self.settle()
        if not self.stages or self.stages[-1][1] != name:
            self.stages.append((self.event + 1, name))

    def birth(self, entry: Entry) -> None:
        """Count a new storage."""
        self.settle()
        self._open(entry)
        self._add(entry.bytes)
        self._note_peak()

    def birth_in_place_of(self, old: Entry, entry: Entry) -> None:
        """Record ``entry``, which torch would have written in place into ``old`` without a dispatch mode. If ``old``
        dies next, ``entry`` takes over its bytes; otherwise ``entry`` counts as new."""
        self.settle()
        self._open(entry)
        self._heir = (old, entry)

    def add_existing(self, entry: Entry) -> None:
        """Count a storage that existed before the step but is seen only now: base and peak rise by its bytes."""
        self.entries.append(entry)
        self.requested.add_before(entry.bytes)
        self.allocated.add_before(rounded(entry.bytes))

    def death(self, entry: Entry) -> None:
        heir = self._heir[1] if self._heir is not None and self._heir[0] is entry else None
        if heir is None:
            self.settle()
            self._free(entry)
        self._heir = None
        self.event += 1
        entry.died = self.event
        self._remove(entry.bytes)
        if heir is not None:
            heir.born, heir.freed_late = self.event, heir.freed_late or entry.freed_late
            self._add(heir.bytes)

    def resize(self, entry: Entry, size: int) -> None:
        """Count memory of another size: it is allocated, what fits is copied into it, and the old memory is freed."""
        self.settle()
        self.event += 1
        old = replace(entry)
        entry.bytes, entry.born, entry.freed_late = size, self.event, None
        self._add(size)
        self._note_peak()
        self.event += 1
        old.died = self.event
        self.entries.append(old)
        self._free(old)
        self._remove(old.bytes)

    def workspace(self, buffers: Iterable[Entry], bounds: tuple[int, int] | None = None) -> None:
        """Count buffers that a kernel allocates and frees before it returns.

        If their sizes are estimated, ``bounds`` are the least and the largest sum of their bytes.
        """
        buffers = tuple(buffers)
        self.event += 1
        for buffer in buffers:
            buffer.born, buffer.phase = self.event, self.phase
        sizes = [buffer.bytes for buffer in buffers]
        for count, usual in ((self.requested, sum(sizes)), (self.allocated, sum(map(rounded, sizes)))):
            least, most = bounds or (usual, usual)
            count.note_estimate(least, usual, most)
        self._note_late_peak((bounds or (0, sum(sizes)))[1])
        self.event += 1
        for buffer in buffers:
            buffer.died = self.event
        self.entries += buffers

    def settle(self) -> None:
        """Count the entry of a pending ``birth_in_place_of`` as new: its old entry did not die next."""
        if self._heir is not None:
            _, entry = self._heir
            self._heir = None
            self._add(entry.bytes)
            self._note_peak()

    def may_be_late(self, entry: Entry, reason: str) -> None:
        """Record that memory may be freed some time after its last reference."""
        entry.freed_late = reason
        self._marked[reason].append(entry)

    def no_longer_late(self, reason: str) -> None:
        """Record that all memory is free by now that might have been freed late for this reason."""
        del self._late[reason]
        for entry in self._marked.pop(reason, ()):
            if entry.freed_late == reason:
                entry.freed_late = None

    # ---------------------------------------------------------------- reading
    @property
    def phase(self) -> str:
        return self.phases[-1][1]

    def restart(self) -> None:
        """Start measuring here: live bytes become the base, and dead entries are dropped."""
        self.settle()
        self.entries = [entry for entry in self.entries if entry.died is None]
        for entry in self.entries:
            entry.born = 0
        self.event, self.phases, self.stages = 0, [(0, "forward")], []
        self.late_peak, self.late_reasons = 0, frozenset()
        self._late.clear()
        for count in (self.requested, self.allocated):
            count.restart()

    def timeline(self, line_of: Callable[[Any], Line | None] = lambda site: None) -> Timeline:
        """The timeline since :meth:`restart`. ``line_of`` turns an entry's site into a line."""
        self.settle()
        ordered = sorted(self.entries, key=lambda entry: entry.born)
        return Timeline(_buffers(ordered, line_of), self.event, tuple(self.phases), tuple(self.stages))

    def left_behind(self, line_of: Callable[[Any], Line | None] = lambda site: None) -> tuple[Allocation, ...]:
        """Allocations since :meth:`restart` that are still alive."""
        self.settle()
        alive = _buffers([entry for entry in self.entries if entry.died is None], line_of)
        return Timeline(alive, self.event, ((0, ""),)).rows_at(self.event)

    def is_alive_since(self, event: int) -> bool:
        """Whether something is alive that was allocated after an event."""
        self.settle()
        return any(entry.died is None and entry.born > event for entry in self.entries)

    # ---------------------------------------------------------------- bookkeeping
    def _open(self, entry: Entry) -> None:
        self.event += 1
        entry.born, entry.phase = self.event, self.phase
        if self.late_births is not None and entry.phase == "backward":
            entry.freed_late = self.late_births
        self.entries.append(entry)

    def _free(self, entry: Entry) -> None:
        if entry.freed_late is not None:
            self._late[entry.freed_late] += entry.bytes

    def _add(self, size: int) -> None:
        self.requested.live += size
        self.allocated.live += rounded(size)

    def _remove(self, size: int) -> None:
        self.requested.live -= size
        self.allocated.live -= rounded(size)

    def _note_peak(self) -> None:
        for count in (self.requested, self.allocated):
            count.note_peak()
        self._note_late_peak()

    def _note_late_peak(self, workspace: int = 0) -> None:
        if self._late:
            peak = self.requested.live + workspace + self._late.total()
            if peak > self.late_peak:
                self.late_peak, self.late_reasons = peak, frozenset(self._late)


def _buffers(entries: Iterable[Entry], line_of: Callable[[Any], Line | None]) -> tuple[Buffer, ...]:
    line_of = functools.cache(line_of)
    return tuple(
        Buffer(entry.bytes, entry.what, line_of(entry.site), entry.phase, entry.born, entry.died)
        for entry in entries
        if entry.bytes
    )
