"""Read and write the file of allocations at each locked peak. It decides nothing; failures use it to name growth."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..atomic_write import write_whole
from ..meters.timeline import Allocation

Peaks = Mapping[str, tuple[Allocation, ...]]
"""Allocations by lock key, as the lock spells it."""

ROWS = 12


def peaks_path(lock_path: Path) -> Path:
    return lock_path.with_suffix(".peaks.json")


def read_peaks(path: Path) -> Peaks:
    """Return the allocations in the file; none where it is missing or unreadable, since it only explains."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return {key: tuple(map(_allocation, rows)) for key, rows in data.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _allocation(row: Sequence[Any]) -> Allocation:
    size, count, what, code = row
    if [type(value) for value in row] != [int, int, str, str]:
        raise ValueError(f"not a row of a peak: {row!r}")
    return Allocation(size, what, "", code, count)


def write_peaks(path: Path, peaks: Peaks) -> None:
    """Write one peak on each line, without line numbers: they change with every edit, and the code finds the line."""
    lines = [
        f"{json.dumps(key)}: {json.dumps([[row.bytes, row.count, row.what, row.code] for row in rows[:ROWS]])}"
        for key, rows in sorted(peaks.items())
    ]
    write_whole(path, "{\n" + ",\n\n".join(lines) + "\n}\n", "the file of peaks")
