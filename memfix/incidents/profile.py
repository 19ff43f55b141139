"""The memory of an incident's train step by stage, beside the figures of its report. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..meters.base import Reading
from ..meters.stages import Stage
from ..meters.timeline import Allocation, Buffer, Timeline, table_lines
from ..units import format_bytes, format_room, format_times

PARAMETERS, INPUTS = "parameters", "batch and tables"
GRADIENTS, STATES, REST = "gradients", "optimizer states", "activations and temporaries"

# the stages of every train step after its first forward; LATER_FORWARDS only with gradient accumulation
BACKWARD, LATER_FORWARDS, OPTIMIZER = "backward", "later forwards", "optimizer step"
LATER_STEP = "every later step"


@dataclass(frozen=True)
class Beside:
    """The report's figure for a stage, and why ours differs."""

    figure: str
    """As the report prints it: ``8.72 GB``."""
    why: str
    claim: str
    """The ids of the claims about it, such as ``LOG-29``."""


@dataclass(frozen=True)
class Row:
    """A stage of the step in a profile.

    ``aside`` marks a stage that does not belong to the step: it was tried on the way and dropped. ``failed`` says why
    it did not finish.
    """

    stage: Stage
    aside: bool = False
    beside: Beside | None = None
    failed: str | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The bytes at its peak by kind; empty for a meter that does not see buffers."""
    rest: tuple[Allocation, ...] = field(default=(), repr=False)
    """Allocations at its peak that are neither the model's nor the optimizer's, by line, largest first."""

    def holders(self, rows: int) -> Iterator[str]:
        """Lines about what holds the memory at the peak: the model, then the source lines behind the rest."""
        for kind, size in self.kinds.items():
            if kind != REST and size:
                yield f"{format_bytes(size):>12}  {kind}"
        yield from table_lines(self.rest, rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.stage),
            "aside": self.aside,
            "report": dataclasses.asdict(self.beside) if self.beside else None,
            "failed": self.failed,
            "kinds_at_peak": dict(self.kinds),
        }


@dataclass(frozen=True)
class ReportedRun:
    """A row of a report's table of configurations: a config of the incident with keys overridden, and the figure."""

    name: str
    file: str
    overrides: tuple[str, ...]
    figure: str
    """As the report prints it: ``~79 GB, fails``."""
    claim: str
    line_along: str | None = None
    """A key with which the bytes grow in a line: a simulation measures 2 and 3 of it, which takes less time."""


@dataclass(frozen=True)
class MeasuredRun:
    """The peak of a later step of a reported run, including everything that existed before; None where it failed."""

    run: ReportedRun
    peak_bytes: int | None
    failed: str | None = None
    kept_bytes: int | None = None
    """The same on the H200, if a result is kept in the repository."""
    times_s: tuple[float, ...] = ()
    """The seconds of a step in each sample, on a GPU; none of a step that is measured by its first forwards alone."""

    @property
    def time(self) -> str:
        """The median of the times with their spread, such as ``812 ms ±1 %``."""
        return format_times(statistics.median(self.times_s), self.times_s) if self.times_s else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.run.name,
            "report": self.run.figure,
            "peak_bytes": self.peak_bytes,
            "failed": self.failed,
            "times_s": list(self.times_s),
        }


@dataclass(frozen=True)
class Profile:
    title: str
    settings: Mapping[str, Any]
    reading: Reading
    rows: tuple[Row, ...]
    capacity_bytes: int | None = None
    """The memory of the GPU, if known."""
    conclusions: tuple[str, ...] = ()
    runs: tuple[MeasuredRun, ...] = ()
    """The report's other configurations, measured by the same meter."""

    @property
    def peak_bytes(self) -> int:
        """The peak of the step itself, without asides."""
        return max(row.stage.peak_bytes for row in self.rows if not row.aside)

    @property
    def headline(self) -> str:
        """The step's own peak, and whether it fits the GPU."""
        before = self.reading.base_bytes
        above = f"{format_bytes(self.peak_bytes - before)} above {format_bytes(before)} that existed before"
        room = "" if self.capacity_bytes is None else f"; {format_room(self.peak_bytes, self.capacity_bytes)}"
        return f"peak of the step: {format_bytes(self.peak_bytes)}, {above}{room}"

    def as_dict(self) -> dict[str, Any]:
        reading = self.reading
        return {
            "subject": self.title,
            "settings": dict(self.settings),
            "meter": reading.meter,
            "device": reading.device,
            "exact": reading.exact,
            "notes": list(reading.notes),
            "capacity_bytes": self.capacity_bytes,
            "peak_bytes": self.peak_bytes,
            "stages": [row.as_dict() for row in self.rows],
            "conclusions": list(self.conclusions),
            "runs": [run.as_dict() for run in self.runs],
        }


class Kinds:
    """Classifies the buffers of a train step by when they were made and freed.

    Buffers that live into the optimizer's phase are gradients; buffers that the optimizer makes and leaves are states.
    Of the bytes that existed before the step, ``parameter_bytes`` are parameters and the rest are inputs.
    """

    def __init__(self, timeline: Timeline, parameter_bytes: int) -> None:
        self._timeline, self._parameter_bytes = timeline, parameter_bytes
        self._optimizer_spans = [(start, end) for start, end, name in timeline.phase_spans() if name == "optimizer"]

    def at(self, event: int) -> dict[str, int]:
        """Bytes alive at ``event``, by kind."""
        sums = dict.fromkeys((PARAMETERS, INPUTS, GRADIENTS, STATES, REST), 0)
        for buffer in self._timeline.alive_at(event):
            sums[self._kind(buffer)] += buffer.bytes
        sums[PARAMETERS] = self._parameter_bytes
        sums[INPUTS] -= self._parameter_bytes
        return sums

    def rest_at(self, event: int) -> tuple[Allocation, ...]:
        """Other allocations alive at ``event`` than parameters, inputs, gradients and states: a row for each line."""
        return self._timeline.rows_at(event, lambda buffer: self._kind(buffer) == REST)

    def _kind(self, buffer: Buffer) -> str:
        if buffer.born == 0:
            return INPUTS
        if buffer.phase == "optimizer":
            outlives = any(start <= buffer.born < end <= _death(buffer) for start, end in self._optimizer_spans)
            return STATES if outlives else REST
        is_left = any(buffer.born < start < _death(buffer) for start, _ in self._optimizer_spans)
        return GRADIENTS if is_left else REST


def _death(buffer: Buffer) -> float:
    return math.inf if buffer.died is None else buffer.died
