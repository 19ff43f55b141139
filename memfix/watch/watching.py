"""The context manager that watches a training loop on a GPU."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Literal

from ..errors import MeterUnavailable, UsageError
from ..meters.base import Reading
from ..meters.cuda import StagePeaks, gpu_unavailable_reason
from ..meters.cuda_history import CudaHistory
from ..meters.recorded import Failure, Moment, Snapshot, failure_of, live_addresses, timeline_of
from ..meters.stages import listening, stage
from .report import STEP, Highest, WatchReport

_NEW_READING = 1.01
"""Factor by which a peak must exceed the kept one to be read anew, because a snapshot takes tenths of a second."""
_FAILED_STEP, _AFTER_LAST_STEP = "failed step", "after the last step"


def watch(
    *,
    predicted: Reading | None = None,
    enabled: bool | Literal["auto"] = "auto",
    device: int | None = None,
    lines: bool = True,
    max_entries: int = 100_000,
    on_failure: Callable[[WatchReport], None] | None = None,
) -> Watch:
    """Watch the memory of a training loop on a real GPU.

    ``predicted`` is a reading to compare with, such as :func:`memfix.peak` returns. Without a GPU, ``enabled="auto"``
    only warns, and ``enabled=True`` raises; ``enabled=False`` does nothing. ``device`` is a GPU's index, by default the
    current one. ``lines=False`` reads only the allocator's counters, which costs nothing per allocation but records no
    source lines. ``max_entries`` bounds the history of one step. ``on_failure`` is called with a report when an
    allocation fails, before torch raises.
    """
    return Watch(
        predicted=predicted, enabled=enabled, device=device, lines=lines, max_entries=max_entries, on_failure=on_failure
    )


class Watch:
    """A running watch; see :func:`watch`. Its methods do nothing if the watch is disabled or finds no GPU."""

    _active: Watch | None = None

    def __init__(
        self,
        *,
        predicted: Reading | None = None,
        enabled: bool | Literal["auto"] = "auto",
        device: int | None = None,
        lines: bool = True,
        max_entries: int = 100_000,
        on_failure: Callable[[WatchReport], None] | None = None,
        gives_way: bool = False,
    ) -> None:
        if enabled not in (True, False, "auto"):
            raise UsageError(f"enabled must be True, False or 'auto', got {enabled!r}")
        if predicted is not None and not isinstance(predicted, Reading):
            raise UsageError(f"predicted must be a Reading, such as memfix.peak returns; got {predicted!r}")
        if max_entries < 1:
            raise UsageError(f"max_entries must be at least 1, got {max_entries}")
        self._predicted, self._enabled, self._wanted_device = predicted, enabled, device
        self._lines, self._max_entries, self._on_failure = lines, max_entries, on_failure
        self._gives_way = gives_way  # whether a new watch ends this one instead of raising
        self._open = contextlib.ExitStack()
        self._device, self._device_name = 0, ""
        self._history: CudaHistory | None = None
        self._before: frozenset[int] = frozenset()
        self._peaks: StagePeaks | None = None
        self._stage: str | None = None
        self._base: dict[str, int] = {}
        self._num_steps: dict[str, int] = {}
        self._highest: dict[tuple[str, str | None], Highest] = {}
        self._reading: tuple[Reading, int] | None = None
        self._bases: list[int] = []
        self._failure: tuple[Failure, str] | None = None
        self._notes: list[str] = []

    # ---------------------------------------------------------------- what a training loop calls
    def __enter__(self) -> Watch:
        if self._enabled is False:
            self._notes.append("nothing was measured: enabled=False")
            return self
        reason = gpu_unavailable_reason()
        if reason is None:
            self._start()
        elif self._enabled is True:
            raise MeterUnavailable(f"memfix.watch cannot measure: {reason}; enabled='auto' does nothing there")
        else:
            self._notes.append(f"nothing was measured: {reason}")
            warnings.warn(f"memfix.watch does nothing here: {reason}", stacklevel=2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if Watch._active is not self:
            return
        import torch

        is_failure = isinstance(error, torch.OutOfMemoryError)
        try:
            if is_failure:
                self._end_step(_FAILED_STEP)
            elif error is None:
                self._end_step(_AFTER_LAST_STEP if STEP in self._num_steps else STEP)
        finally:
            self._peaks = None
            self._open.close()
        if not is_failure and self._failure is not None:
            self._notes.append(f"an allocation failed in {self._failure[1]} and the program went on")
            self._failure = None
        if is_failure and error is not None:
            error.add_note(str(self.report()))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name a part of the step. An inner stage interrupts the outer one."""
        outer = self._stage
        self.enter_stage(name)
        try:
            yield
        finally:
            self.enter_stage(outer)

    def enter_stage(self, name: str | None) -> None:
        """Begin a stage, which ends the current one; None only ends the current one.

        In a simulated step, where a watch measures nothing, this sets the stage of the simulated reading.
        """
        self._stage = name
        if self._peaks is None:
            stage(name)
            return
        self._peaks.enter(name)
        if self._history is not None:
            self._history.enter_stage(name)

    def step(self, kind: str = STEP) -> None:
        """End a step. Steps other than training steps, such as a validation, need a ``kind`` of their own."""
        if self._peaks is not None:
            self._end_step(kind)

    def report(self) -> WatchReport:
        """Return the report of the measurements so far."""
        reading, number = self._reading or (None, 0)
        failure, failed_in = self._failure or (None, "")
        return WatchReport(
            device=self._device_name,
            num_steps=self._num_steps.get(STEP, 0),
            peaks=tuple(sorted(self._highest.values(), key=lambda peak: (peak.kind != STEP, peak.stage is None))),
            reading=reading,
            read_step=number,
            predicted=self._predicted,
            failure=failure,
            failed_in=failed_in,
            growth=(self._bases[0], self._bases[-1]) if len(self._bases) > 1 else None,
            notes=tuple(self._notes),
        )

    # ---------------------------------------------------------------- steps
    def _start(self) -> None:
        import torch

        if Watch._active is not None and Watch._active._gives_way:
            Watch._active.__exit__(None, None, None)
        if Watch._active is not None:
            raise UsageError("memfix.watch is running already; end it first: the allocator keeps one history a process")
        torch.cuda.init()
        self._device = torch.cuda.current_device() if self._wanted_device is None else self._wanted_device
        self._device_name = torch.cuda.get_device_name(self._device)
        with contextlib.ExitStack() as opening:
            if self._lines:
                self._history = CudaHistory(self._device, self._max_entries, self._allocation_failed)
                opening.enter_context(self._history)
                self._before = live_addresses(self._history.snapshot(), self._device)
            opening.enter_context(self._alone())
            opening.enter_context(listening(self.enter_stage))
            self._begin_step(StagePeaks(self._device).finished())
            self._open = opening.pop_all()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        Watch._active = self
        try:
            yield
        finally:
            Watch._active = None

    def _begin_step(self, stats: dict[str, int]) -> None:
        import torch

        torch.cuda.reset_peak_memory_stats(self._device)
        self._base = stats
        self._peaks = StagePeaks(self._device)
        self._peaks.enter(self._stage)
        if self._history is not None:
            self._history.restart()

    def _end_step(self, kind: str) -> None:
        assert self._peaks is not None
        stats = self._peaks.finished()
        peak_bytes = stats["requested_bytes.all.peak"]
        if kind == _AFTER_LAST_STEP and peak_bytes <= self.report().peak_bytes:
            return
        number = self._num_steps[kind] = self._num_steps.get(kind, 0) + 1
        if kind == _FAILED_STEP:
            number = self._num_steps.get(STEP, 0) + 1
        for stage_peak in self._peaks.stages:
            self._note_peak(Highest(kind, stage_peak.name, stage_peak.peak_bytes, number))
        self._note_peak(Highest(kind, None, peak_bytes, number))
        if kind == STEP:
            self._read(stats, number)
        self._begin_step(stats)

    def _note_peak(self, new: Highest) -> None:
        old = self._highest.get((new.kind, new.stage))
        if old is None or new.peak_bytes > old.peak_bytes:
            self._highest[new.kind, new.stage] = new

    def _read(self, stats: dict[str, int], number: int) -> None:
        """Keep the reading of a training step with a new highest peak.

        The second step replaces the first even with a slightly lower peak: optimizers create their states in the first.
        """
        if number > 1:
            self._bases = [*self._bases[:1], self._base["requested_bytes.all.current"]]
        if self._reading is not None:
            kept = self._reading[0]
            least = kept.total_bytes * (_NEW_READING if number > 2 else 1 / _NEW_READING)
            if stats["requested_bytes.all.peak"] <= least:
                return
        self._reading = (self._reading_of(stats), number)

    def _reading_of(self, stats: dict[str, int]) -> Reading:
        assert self._peaks is not None
        seen: dict[str, Any] = {}
        if self._history is not None:
            timeline = timeline_of(self._history.snapshot(), self._device, self._before)
            seen = {"timeline": timeline, "alive_at_peak": timeline.at_peak()}
            if max(timeline.live_bytes) != stats["requested_bytes.all.peak"]:
                seen["notes"] = (
                    f"the allocator's history of {self._max_entries:,} entries does not hold the peak, so the rows are "
                    "those of another moment; raise max_entries",
                )

        def above(count: str, point: str) -> int:
            return stats[f"{count}_bytes.all.{point}"] - self._base[f"{count}_bytes.all.current"]

        return Reading(
            meter="cuda",
            device=self._device_name,
            peak_bytes=above("requested", "peak"),
            base_bytes=self._base["requested_bytes.all.current"],
            held_bytes=above("requested", "current"),
            leaked_bytes=0,  # a loop may keep results of a step, so bytes that stay alive are no leak
            allocated_bytes=above("allocated", "peak"),
            reserved_bytes=above("reserved", "peak"),
            stages=tuple(self._peaks.stages),
            **seen,
        )

    # ---------------------------------------------------------------- failures
    def _allocation_failed(self, snapshot: Snapshot, moment: Moment) -> None:
        """Keep the allocations alive at a failure. Torch calls this before it raises, so this must not raise itself."""
        stage_name = f", stage {self._stage}" if self._stage else ""
        where = f"step {self._num_steps.get(STEP, 0) + 1}{stage_name}{_rank_name()}"
        try:
            failure = failure_of(snapshot, self._device, self._before, moment)
            if failure is not None:
                self._failure = (failure, where)
                if self._on_failure is not None:
                    self._on_failure(self.report())
        except Exception as error:
            self._notes.append(f"the failed allocation in {where} could not be explained: {error!r}")


def _rank_name() -> str:
    from torch import distributed

    is_one_of_many = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return f", rank {distributed.get_rank()}" if is_one_of_many else ""
