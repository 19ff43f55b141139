"""The bytes that a phase is judged by, and the allocations behind them. Imports no torch."""

from __future__ import annotations

from dataclasses import replace

from ..laws import Phase
from ..meters.base import Reading


def bytes_of(reading: Reading, phase: Phase) -> int:
    """The bytes that a phase is judged by: what is held after the forward, or the highest peak that is possible."""
    return reading.held_bytes if phase == "held" else reading.highest_bytes


def explained(reading: Reading, phase: str) -> tuple[str, ...]:
    """The largest allocations behind a phase's bytes, for the lines below a failure."""
    if phase == "held" and reading.timeline is not None:
        timeline = reading.timeline
        reading = replace(reading, alive_at_peak=timeline.rows_at(timeline.num_events))
    if not reading.alive_at_peak:
        return ()
    title = _TITLES.get(phase, "alive at the peak")
    lines = (f"  {title}, largest first", *(f"  {line}" for line in reading.table_lines(6)))
    return (*lines, f"  likely cause: {reading.hint}") if reading.hint else lines


_TITLES = {
    "held": "held when the forward has ended",
    "saved": "inputs that are kept for backward",
    "kept": "kept for good",
}
