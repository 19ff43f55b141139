"""When a form counts as slower. Pure: ratios in, a verdict out; imports no torch.

A process gives one ratio, the median over its pairs, because what a process happens to be dealt (addresses, cores,
clocks) stays with it. So processes are what is sampled: the figure is the median over them, and its interval runs from
the smallest to the largest, which holds the true median with 94 % for five processes, whatever the distribution.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PROCESSES, MOST_PROCESSES = 5, 9
PAIRS = 30
SAMPLE_S, MOST_RACE_S = 0.004, 1.5
CANARY_FACTOR = 1.10

ALLOWED = 1.03
"""Over base. On a GPU it comes down to what the processes themselves agree to, but not below ``ALLOWED_AT_BEST``."""
ALLOWED_AT_BEST = 1.01
SIGMAS = 4.0
_RANGE_PER_SIGMA = {5: 2.33, 6: 2.53, 7: 2.70, 8: 2.85, 9: 2.97}

Answer = Literal["within", "over", "undecided"]


@dataclass(frozen=True)
class Spread:
    """The ratios of several processes."""

    ratios: tuple[float, ...]
    pairs: int
    """Of all processes together."""
    first_s: float
    second_s: float

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def low(self) -> float:
        return min(self.ratios)

    @property
    def high(self) -> float:
        return max(self.ratios)

    def spelled(self) -> str:
        processes = f"{len(self.ratios)} process{'es' if len(self.ratios) > 1 else ''}"
        return f"{self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f}; {processes}, {self.pairs} pairs)"


def allowed_over_base(device: str, ratios: Sequence[float]) -> float:
    """How far a form may be above its own time at base, by how well the processes agree."""
    if device == "cpu":
        return ALLOWED
    per_sigma = _RANGE_PER_SIGMA.get(len(ratios))
    if per_sigma is None:
        return ALLOWED
    sigma = (max(ratios) - min(ratios)) / per_sigma
    return min(ALLOWED, max(ALLOWED_AT_BEST, 1 + SIGMAS * sigma))


def answer(spread: Spread, limit: float) -> Answer:
    """Undecided while the limit lies within the interval and more processes may still be asked."""
    if spread.low <= limit < spread.high and len(spread.ratios) < MOST_PROCESSES:
        return "undecided"
    return "over" if spread.ratio > limit else "within"
