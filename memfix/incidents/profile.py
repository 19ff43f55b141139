"""The memory of an incident's train step by stage, beside the figures of its report. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..meters.base import Reading
from ..meters.stages import Stage
from ..meters.timeline import Allocation, Buffer, Timeline, table_lines
from ..units import format_bytes, format_room, format_times

PARAMETERS, INPUTS = "parameters", "batch and tables"
GRADIENTS, STATES, ACTIVATIONS = "gradients", "optimizer states", "activations and temporaries"

# stages that every train step has after its first forward; LATER_FORWARDS only with gradient accumulation
BACKWARD, LATER_FORWARDS, OPTIMIZER = "backward", "later forwards", "optimizer step"
LATER_STEP = "every later step"

# prefix of the error message of a step that could not be measured
STEP_FAILED_PREFIX = "the step itself: "

# the columns of the table of runs that hold words, not numbers
TEXT_COLUMNS = CONFIGURATION, REPORT, CLAIM = "configuration", "report", "claim"


@dataclass(frozen=True)
class ReportedFigure:
    """The report's figure for a stage, and why ours differs."""

    figure: str
    """As the report prints it: ``8.72 GB``."""
    why: str
    claim: str
    """The ids of the claims about it, such as ``LOG-29``."""


@dataclass(frozen=True)
class Row:
    """A stage of the step in a profile.

    ``aside`` marks a stage that does not belong to the step: a computation that was tried and dropped. ``failed`` says
    why the stage did not finish.
    """

    stage: Stage
    aside: bool = False
    reported: ReportedFigure | None = None
    failed: str | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)
    """The bytes alive at the stage's peak, by kind; empty if the meter does not see single buffers."""
    activations: tuple[Allocation, ...] = field(default=(), repr=False)
    """The allocations alive at the peak that are of kind ``ACTIVATIONS``, one row per source line, largest first."""

    def holders(self, rows: int) -> Iterator[str]:
        """Lines that say what holds the memory at the peak: each kind, then the source lines behind ``ACTIVATIONS``."""
        for kind, size in self.kinds.items():
            if kind != ACTIVATIONS and size:
                yield f"{format_bytes(size):>12}  {kind}"
        yield from table_lines(self.activations, rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            **dataclasses.asdict(self.stage),
            "aside": self.aside,
            "report": dataclasses.asdict(self.reported) if self.reported else None,
            "failed": self.failed,
            "kinds_at_peak": dict(self.kinds),
        }


@dataclass(frozen=True)
class ReportedRun:
    """A row of a report's table of configurations: a config of the incident with keys overridden, and the figure."""

    name: str
    overrides: tuple[str, ...]
    figure: str
    """As the report prints it: ``~79 GB, fails``."""
    claim: str
    file: str | None = None
    """The config file; None for that of the report's own step."""
    linear_in: str | None = None
    """A config key in which the peak is linear. To save time, a simulation measures the values 2 and 3 of the key and
    extrapolates."""


@dataclass(frozen=True)
class MeasuredRun:
    """The peak of a later step of a reported run, including what existed before the step; None if the run failed."""

    run: ReportedRun
    peak_bytes: int | None
    failed: str | None = None
    times_s: tuple[float, ...] = ()
    """The seconds of a step on a GPU, one per sample; empty if only the first forwards of the step are measured."""
    parameters: int | None = None
    """The number of the model's parameters, if the incident counts them."""
    kept: MeasuredRun | None = None
    """The result of this run on an H200, if the repository keeps one."""

    @property
    def peak(self) -> str:
        return (
            format_bytes(self.peak_bytes)
            if self.peak_bytes is not None
            else (self.failed or "").removeprefix(STEP_FAILED_PREFIX)
        )

    @property
    def time(self) -> str:
        """The median of the times with their spread, such as ``812 ms ±1 %``."""
        return format_times(statistics.median(self.times_s), self.times_s) if self.times_s else ""

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.run.name,
            "report": self.run.figure,
            "parameters": self.parameters,
            "peak_bytes": self.peak_bytes,
            "failed": self.failed,
            "times_s": list(self.times_s),
        }


def kept_runs(runs: Iterable[ReportedRun], path: Path) -> dict[str, MeasuredRun]:
    """The results of ``runs`` in a file of ``memfix profile --json``, by the run's name; empty if there is no file."""
    kept = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    data = {one["name"]: one for one in kept}
    return {
        run.name: MeasuredRun(
            run, of["peak_bytes"], of["failed"], tuple(of.get("times_s", ())), parameters=of.get("parameters")
        )
        for run in runs
        if (of := data.get(run.name))
    }


def run_columns(runs: Sequence[MeasuredRun], meter: str, capacity_bytes: int) -> dict[str, list[str]]:
    """The columns of the table of runs, by heading, for the terminal and the manual. Empty columns are left out."""
    fits = [run.peak_bytes is not None and run.peak_bytes <= capacity_bytes for run in runs]
    unknown = "not measured" if any(run.kept for run in runs) else ""
    columns = {
        CONFIGURATION: [run.run.name for run in runs],
        "parameters": [f"{run.parameters:,}" if run.parameters else "" for run in runs],
        meter: [run.peak for run in runs],
        f"{meter} step": [run.time for run in runs],
        "H200, kept": [run.kept.peak if run.kept else unknown for run in runs],
        "H200 step, kept": [run.kept.time if run.kept else "" for run in runs],
        f"fits in {format_bytes(capacity_bytes)}": ["yes" if one else "no" for one in fits],
        REPORT: [run.run.figure for run in runs],
        CLAIM: [run.run.claim for run in runs],
    }
    return {name: cells for name, cells in columns.items() if any(cells)}


@dataclass(frozen=True)
class Profile:
    title: str
    settings: Mapping[str, Any]
    reading: Reading
    rows: tuple[Row, ...]
    capacity_bytes: int
    """The memory that the step should fit."""
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
        room = format_room(self.peak_bytes, self.capacity_bytes)
        return f"peak of the step: {format_bytes(self.peak_bytes)}, {above}; {room}"

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

    A buffer that is made before an optimizer step and is alive when the step begins is a gradient. A buffer that the
    optimizer makes and that outlives the optimizer's step is a state. Of the bytes that existed before the train step,
    ``parameter_bytes`` are parameters and the others are inputs.
    """

    def __init__(self, timeline: Timeline, parameter_bytes: int) -> None:
        self._timeline, self._parameter_bytes = timeline, parameter_bytes
        self._optimizer_spans = [(start, end) for start, end, name in timeline.phase_spans() if name == "optimizer"]

    def at(self, event: int) -> dict[str, int]:
        """Bytes alive at ``event``, by kind."""
        sums = dict.fromkeys((PARAMETERS, INPUTS, GRADIENTS, STATES, ACTIVATIONS), 0)
        for buffer in self._timeline.alive_at(event):
            sums[self._kind(buffer)] += buffer.bytes
        sums[PARAMETERS] = self._parameter_bytes
        sums[INPUTS] -= self._parameter_bytes
        return sums

    def activations_at(self, event: int) -> tuple[Allocation, ...]:
        """The allocations of kind ``ACTIVATIONS`` that are alive at ``event``, one row per source line."""
        return self._timeline.rows_at(event, lambda buffer: self._kind(buffer) == ACTIVATIONS)

    def _kind(self, buffer: Buffer) -> str:
        if buffer.born == 0:
            return INPUTS
        if buffer.phase == "optimizer":
            outlives = any(start <= buffer.born < end <= _death(buffer) for start, end in self._optimizer_spans)
            return STATES if outlives else ACTIVATIONS
        is_left = any(buffer.born < start < _death(buffer) for start, _ in self._optimizer_spans)
        return GRADIENTS if is_left else ACTIVATIONS


def _death(buffer: Buffer) -> float:
    return math.inf if buffer.died is None else buffer.died
