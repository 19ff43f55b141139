"""What a finding measured: bytes, a ratio of times, growth. Plain frozen data that reports print; imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from ..units import format_seconds

BytesAgainst = Literal["budget", "lock", "base"]
_REFERENCES: dict[BytesAgainst, str] = {"budget": "limit_bytes", "lock": "locked_bytes", "base": "before_bytes"}
TimedAgainst = Literal["naive", "base", "canary"]
"""What a form's time is divided by. The canary divides a form slowed on purpose by itself: the clock must notice."""
Figures = dict[str, float]
"""The numbers of a measurement by their names in JSON."""


@dataclass(frozen=True)
class Bytes:
    """Bytes of one form in one phase, and the bytes that they are compared with.

    ``used`` is None for a lock entry that nothing measures any more; ``reference`` is None where the lock has no entry.
    """

    used: int | None
    reference: int | None
    against: BytesAgainst

    @property
    def growth(self) -> int:
        """Bytes above the reference; 0 where there is none."""
        return 0 if self.reference is None else (self.used or 0) - self.reference

    def figures(self) -> Figures:
        both = {"bytes": self.used, _REFERENCES[self.against]: self.reference}
        return {name: value for name, value in both.items() if value is not None}


@dataclass(frozen=True)
class Ratio:
    """A form's time divided by another one: naive's, its own at the base commit, or its own without a delay (canary).

    ``other_s`` is the other time in the pair of samples that gave the ratio, so the two times never contradict it.
    ``interval`` is the confidence interval, where several processes gave one.
    """

    ratio: float
    other_s: float
    against: TimedAgainst
    limit: float
    pairs: int
    interval: tuple[float, float] | None = None
    processes: int = 1

    @property
    def seconds(self) -> float:
        """The form's own time."""
        return self.ratio * self.other_s

    def spelled(self) -> str:
        """``1.055x (1.042 to 1.068; 2 processes, 60 pairs)``"""
        interval = "{:.3f} to {:.3f}; ".format(*self.interval) if self.interval else ""
        processes = f"{self.processes} process{'es' if self.processes > 1 else ''}"
        return f"{self.ratio:.3f}x ({interval}{processes}, {self.pairs} pairs)"

    def message(self, of: str, device: str) -> str:
        """The sentence about a form that takes this multiple ``of`` another time."""
        times = f"{format_seconds(self.seconds)} against {format_seconds(self.other_s)}"
        return f"takes {self.spelled()} {of}, allowed {self.limit:.3g}x on {device} ({times})"

    def figures(self) -> Figures:
        low_and_high = dict(zip(("low", "high"), self.interval or (), strict=False))
        return {
            "ratio": self.ratio, **low_and_high, "limit": self.limit, "processes": self.processes, "pairs": self.pairs,
            "seconds": self.seconds, f"{self.against}_seconds": self.other_s,
        }  # fmt: skip


@dataclass(frozen=True)
class _NamedAsInJson:
    def figures(self) -> Figures:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Growth(_NamedAsInJson):
    """How the peak grows with one dim: the exponent, from the peaks at two sizes."""

    exponent: float


@dataclass(frozen=True)
class SharedMemory(_NamedAsInJson):
    """The most shared memory that one block of a form's kernels takes."""

    shared_bytes: int


@dataclass(frozen=True)
class Agreement(_NamedAsInJson):
    """The bytes of one step on the simulated meter, and in the allocator of a real GPU."""

    simulated_bytes: int
    allocator_bytes: int


Measured = Bytes | Ratio | Growth | SharedMemory | Agreement


def from_figures(figures: Mapping[str, float]) -> Measured | None:
    """Read what another memfix measured from the figures in its JSON report: the inverse of ``figures()``."""
    for against, name in _REFERENCES.items():
        if name in figures:
            used = figures.get("bytes")
            return Bytes(None if used is None else int(used), int(figures[name]), against)
    if "bytes" in figures:
        return Bytes(int(figures["bytes"]), None, "lock")
    for timed in get_args(TimedAgainst):
        if {"ratio", "limit", "pairs", "processes", f"{timed}_seconds"} <= figures.keys():
            interval = (figures["low"], figures["high"]) if {"low", "high"} <= figures.keys() else None
            other_s, pairs, processes = figures[f"{timed}_seconds"], int(figures["pairs"]), int(figures["processes"])
            return Ratio(figures["ratio"], other_s, timed, figures["limit"], pairs, interval, processes)
    if "exponent" in figures:
        return Growth(figures["exponent"])
    if {"simulated_bytes", "allocator_bytes"} <= figures.keys():
        return Agreement(int(figures["simulated_bytes"]), int(figures["allocator_bytes"]))
    return SharedMemory(int(figures["shared_bytes"])) if "shared_bytes" in figures else None
