"""The difference between the peaks of two readings, row by row. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..units import format_bytes
from .timeline import Allocation


@dataclass(frozen=True)
class Change:
    """A row that differs between two peaks. ``before`` or ``now`` is None if it was not alive at that peak."""

    before: Allocation | None
    now: Allocation | None

    @property
    def bytes(self) -> int:
        return (self.now.bytes if self.now else 0) - (self.before.bytes if self.before else 0)

    def __str__(self) -> str:
        row = self.now or self.before
        assert row is not None
        signed = f"{'+' if self.bytes >= 0 else '-'}{format_bytes(abs(self.bytes))}"
        maker = f"`{row.code}`" if row.code else row.what
        place = row.place.split(" in ")[0]
        return f"{signed}: {maker}{f' {place}' if place else ''}, {self._fate()} ({row.what})"

    def _fate(self) -> str:
        if self.before is None:
            return "now alive at the peak"
        if self.now is None:
            return "no longer alive at the peak"
        if self.now.count != self.before.count:
            return f"{self.before.count} -> {self.now.count} of them alive at the peak"
        return f"{format_bytes(self.before.bytes)} -> {format_bytes(self.now.bytes)}"


def changes(before: Sequence[Allocation], now: Sequence[Allocation]) -> tuple[Change, ...]:
    """The rows that differ, the largest growth first. Rows match by operator and source text: line numbers shift."""
    was, now_is = _by_key(before), _by_key(now)
    pairs = [Change(was.get(key), now_is.get(key)) for key in was | now_is]
    return tuple(sorted((pair for pair in pairs if pair.bytes), key=lambda pair: -pair.bytes))


def _by_key(rows: Sequence[Allocation]) -> dict[tuple[str, str], Allocation]:
    """Rows by operator and source text. Rows of two lines with the same text are added up."""
    merged: dict[tuple[str, str], Allocation] = {}
    for row in rows:
        same = merged.get(_key(row))
        both = replace(same, bytes=same.bytes + row.bytes, count=same.count + row.count) if same else row
        merged[_key(row)] = both
    return merged


def _key(row: Allocation) -> tuple[str, str]:
    return row.what, row.code or row.place
