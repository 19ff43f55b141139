"""What the trainers' callbacks share: a watch that they open and close for each training run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from ..meters.base import Reading
from ..progress import Say
from ..units import format_bytes
from ..watch import Watch, WatchReport

VALIDATION = "validation"
_RANKS_SHOWN = 8


class TrainingWatch:
    """Opens a watch when training begins, and passes its report to ``say`` when training ends, on the first rank.

    If a trainer does not pass an exception to its callbacks, the watch stays open; the next watch then ends it.
    """

    def __init__(self, say: Say, **options: Any) -> None:
        self._say, self._options = say, options
        self.watch = Watch(enabled=False)
        self.report: WatchReport = self.watch.report()

    def begin(self) -> None:
        self.watch = Watch(**self._options, gives_way=True)
        self.watch.__enter__()

    def end(self, *, is_first_rank: bool) -> None:
        """Close the watch. On the first rank, pass the report and the peaks of all ranks to ``say``."""
        self._close(None)
        peaks = _of_all_ranks(self.report.peak_bytes)
        if is_first_rank:
            self._say("\n".join([*self.report.lines(), *_rank_lines(peaks)]))

    def fail(self, error: BaseException) -> None:
        """Close the watch after an error. An out-of-memory error gets the report as a note."""
        self._close(error)

    def begin_validation(self) -> None:
        self.watch.enter_stage(VALIDATION)

    def end_validation(self) -> None:
        self.watch.enter_stage(None)
        self.watch.step(VALIDATION)

    def _close(self, error: BaseException | None) -> None:
        self.watch.__exit__(type(error) if error else None, error, error.__traceback__ if error else None)
        self.report = self.watch.report()


class WatchingCallback:
    """The base class of all callbacks, with their options and the report."""

    _on_failure: Callable[[WatchReport], None] | None = None

    def __init__(
        self,
        *,
        predicted: Reading | None = None,
        enabled: bool | Literal["auto"] = "auto",
        lines: bool = True,
        max_entries: int = 100_000,
        say: Say = print,
    ) -> None:
        self._training = TrainingWatch(
            say, predicted=predicted, enabled=enabled, lines=lines, max_entries=max_entries, on_failure=self._on_failure
        )

    @property
    def report(self) -> WatchReport:
        """The report of the last training run that ended."""
        return self._training.report


def _of_all_ranks(peak_bytes: int) -> list[int]:
    """Gather the peak of every rank. All ranks must call this, even those that measured nothing."""
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return [peak_bytes]
    peaks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(peaks, peak_bytes)
    return peaks


def _rank_lines(peaks: list[int]) -> list[str]:
    if len(peaks) == 1 or not any(peaks):
        return []
    ranks = sorted(range(len(peaks)), key=peaks.__getitem__, reverse=True)
    shown = ranks if len(ranks) <= _RANKS_SHOWN else [*ranks[: _RANKS_SHOWN - 1], ranks[-1]]
    every = ", ".join(f"rank {rank} {format_bytes(peaks[rank])}" for rank in shown)
    left_out = f" ({len(ranks) - len(shown)} between them left out)" if len(shown) < len(ranks) else ""
    return [f"peaks, highest first: {every}{left_out}"]
