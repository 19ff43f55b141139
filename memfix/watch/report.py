"""The report of a watch: the highest peak of every stage, beside the prediction. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..meters.base import Reading
from ..meters.recorded import Failure
from ..units import format_bytes

STEP = "step"
_GROWTH = 1.01  # smallest growth of the live memory before a step that the report mentions


@dataclass(frozen=True)
class Highest:
    """The highest peak of one stage over all steps of a kind. Bytes include all live memory."""

    kind: str
    """``step``, or the name given to :meth:`memfix.Watch.step`."""
    stage: str | None
    """None for the whole step."""
    peak_bytes: int
    step: int
    """Which step of that kind reached the peak, counted from 1."""

    @property
    def name(self) -> str:
        """The name of its row in the table."""
        if self.stage is None:
            return "whole step" if self.kind == STEP else self.kind
        return self.stage if self.kind == STEP else f"{self.kind}: {self.stage}"


@dataclass(frozen=True)
class WatchReport:
    """The measurements of a watch so far. ``print`` the report, or take :meth:`as_dict`."""

    device: str = ""
    num_steps: int = 0
    peaks: tuple[Highest, ...] = ()
    """The highest peak of each stage of a step in order, then of the whole step, then of steps of other kinds."""
    reading: Reading | None = field(default=None, repr=False)
    """The reading of the training step with the highest peak, with its timeline if lines were recorded."""
    read_step: int = 0
    """The number of the step of ``reading``."""
    predicted: Reading | None = field(default=None, repr=False)
    failure: Failure | None = field(default=None, repr=False)
    failed_in: str = ""
    """Where :attr:`failure` happened, as ``step 3, stage backward``."""
    growth: tuple[int, int] | None = None
    """Live bytes before the second step and before the last one."""
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The highest peak of all steps and stages, with all live memory."""
        return max((highest.peak_bytes for highest in self.peaks), default=0)

    def difference_bytes(self) -> int | None:
        """The real peak of ``reading`` minus the predicted one, both above the live memory before the step."""
        if self.predicted is None or self.reading is None:
            return None
        return self.reading.peak_bytes - self.predicted.peak_bytes

    def as_dict(self) -> dict[str, Any]:
        """The report as plain data for JSON, without timelines."""
        data = {name.name: getattr(self, name.name) for name in dataclasses.fields(self)}
        for name in ("reading", "predicted", "failure"):
            data[name] = data[name].as_dict() if data[name] else None
        data["peaks"] = [dataclasses.asdict(highest) for highest in self.peaks]
        return {**data, "peak_bytes": self.peak_bytes, "difference_bytes": self.difference_bytes()}

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, rows: int = 8) -> list[str]:
        """The report as lines of text, with at most ``rows`` rows of live allocations."""
        lines = [*self._failure_lines(rows)]
        if self.peaks:
            steps = f"{self.num_steps} step{'s' if self.num_steps != 1 else ''}"
            lines += [f"memfix watch: {steps} on {self.device}, peak {format_bytes(self.peak_bytes)}"]
            lines += [*self._peak_lines(), *self._reading_lines(rows)]
        return [*lines, *(f"{'note' if lines else 'memfix watch'}: {note}" for note in self.notes)]

    def _failure_lines(self, rows: int) -> Iterator[str]:
        if self.failure is not None:
            first, *rest = self.failure.lines(rows)
            yield f"memfix: out of memory in {self.failed_in}: {first}"
            yield from rest

    def _peak_lines(self) -> Iterator[str]:
        beside = self._predicted_peaks()
        width = max(len(highest.name) for highest in self.peaks)
        head = f"  {'':{width}}  {'peak':>12}  at step"
        yield head + (f"  {'predicted':>12}  {'difference':>12}" if beside else "")
        for highest in self.peaks:
            line = f"  {highest.name:{width}}  {format_bytes(highest.peak_bytes):>12}  {highest.step:>7}"
            predicted = beside.get(highest.stage) if highest.kind == STEP else None
            if predicted is not None:
                line += f"  {format_bytes(predicted):>12}  {_signed(highest.peak_bytes - predicted):>12}"
            yield line

    def _predicted_peaks(self) -> Mapping[str | None, int]:
        if self.predicted is None:
            return {}
        peaks: dict[str | None, int] = {None: self.predicted.total_bytes}
        for stage in self.predicted.stages:
            peaks[stage.name] = max(peaks.get(stage.name, 0), stage.peak_bytes)
        return peaks

    def _reading_lines(self, rows: int) -> Iterator[str]:
        reading, predicted = self.reading, self.predicted
        if reading is None:
            return
        real = f"{format_bytes(reading.peak_bytes)} above {format_bytes(reading.base_bytes)} that were live before it"
        yield f"step {self.read_step} took {real}"
        if predicted is not None:
            said = f"{format_bytes(predicted.peak_bytes)} above {format_bytes(predicted.base_bytes)}"
            off = f"difference of the step itself {_signed(reading.peak_bytes - predicted.peak_bytes)}"
            yield f"predicted: {said}{'' if predicted.exact else ', an estimate'}; {off}"
        if self.growth is not None and self.growth[1] > _GROWTH * self.growth[0]:
            first, last = map(format_bytes, self.growth)
            yield f"live memory before a step grew from {first} (step 2) to {last} (step {self.num_steps})"
        if reading.alive_at_peak:
            yield f"alive at the peak of step {self.read_step}, largest first"
            yield from reading.table_lines(rows)
        if reading.hint:
            yield f"likely cause: {reading.hint}"
        yield from (f"note: {note}" for note in reading.notes)


def _signed(count: int) -> str:
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"
