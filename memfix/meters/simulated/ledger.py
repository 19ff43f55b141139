"""The book of live bytes: births, deaths, transient workspace, and who was alive at the peak.

Knows nothing of torch. Time is a count of events, so two runs of the same code give the same book.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

ALLOCATION_ROUNDING = 512  # the caching allocator's smallest unit


def rounded(count: int) -> int:
    return -(-count // ALLOCATION_ROUNDING) * ALLOCATION_ROUNDING


@dataclass(eq=False)
class Entry:
    """One storage. ``born`` and ``died`` are events; an input that existed before has ``born == 0``."""

    bytes: int
    what: str
    site: object = None  # opaque to the ledger: where in the user's code it comes from
    in_backward: bool = False
    born: int = 0
    died: int | None = None

    def alive_at(self, event: int) -> bool:
        return self.born <= event and (self.died is None or self.died > event)


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
    base_event: int = 0
    peak_event: int = 0
    peak_in_backward: bool = False
    peak_workspace: tuple[Entry, ...] = ()
    _heir: tuple[Entry, Entry] | None = None

    # ---------------------------------------------------------------- what happens
    def birth(self, entry: Entry) -> None:
        """New bytes, from now on."""
        self.settle()
        self._open(entry)
        self._add(entry.bytes)
        self._note_peak(entry.in_backward)

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
        self._note_peak(entry.in_backward)

    def workspace(self, buffers: Iterable[Entry]) -> None:
        """Bytes that a kernel takes and gives back before it returns."""
        buffers = tuple(buffers)
        for buffer in buffers:
            self._add(buffer.bytes)
        self._note_peak(any(buffer.in_backward for buffer in buffers), buffers)
        for buffer in buffers:
            self._remove(buffer.bytes)

    def settle(self) -> None:
        """No death followed the last ``birth_in_place_of``: both are alive."""
        if self._heir is not None:
            _, entry = self._heir
            self._heir = None
            self._add(entry.bytes)
            self._note_peak(entry.in_backward)

    # ---------------------------------------------------------------- what is asked
    def restart(self) -> None:
        """Measure from here: the base is what is live now."""
        self.settle()
        self.event += 1
        self.base_event = self.peak_event = self.event
        self.peak_in_backward, self.peak_workspace = False, ()
        for mark in (self.requested, self.allocated):
            mark.base = mark.peak = mark.live

    def alive_at_peak(self) -> list[Entry]:
        """Entries above the base that were alive when requested bytes peaked, workspace included."""
        return [
            entry for entry in self.entries if entry.born > self.base_event and entry.alive_at(self.peak_event)
        ] + list(self.peak_workspace)

    # ---------------------------------------------------------------- bookkeeping
    def _open(self, entry: Entry) -> None:
        self.event += 1
        entry.born = self.event
        self.entries.append(entry)

    def _add(self, size: int) -> None:
        self.requested.live += size
        self.allocated.live += rounded(size)

    def _remove(self, size: int) -> None:
        self.requested.live -= size
        self.allocated.live -= rounded(size)

    def _note_peak(self, in_backward: bool, workspace: tuple[Entry, ...] = ()) -> None:
        self.allocated.peak = max(self.allocated.peak, self.allocated.live)
        if self.requested.live > self.requested.peak:
            self.requested.peak = self.requested.live
            self.peak_event, self.peak_in_backward, self.peak_workspace = self.event, in_backward, workspace
