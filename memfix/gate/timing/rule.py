"""The rule by which a form counts as slower. Pure: ratios in, a decision out; imports no torch.

Each process gives one ratio, the median over its pairs: its addresses, core and clock stay the same while it runs, so
more pairs cannot average them out. The sample is therefore a series of processes. While the limit lies inside
the confidence interval of their mean, another process is started; after the last one their median decides.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from ...checks.measured import Ratio, TimedAgainst
from ...meters.clock import Race, median_pair
from .timing_plan import Comparison

MOST_PROCESSES = 8
SAMPLE_S, MOST_PAIRS = 0.001, 400
"""Many short samples: a disturbance outlasts a sample of any length, so a second of short samples shows more."""
RACE_S: dict[TimedAgainst, tuple[float, float]] = {"base": (1.0, 2.0), "naive": (0.4, 0.4), "canary": (0.4, 0.4)}
"""Seconds of a race, and the most seconds while the error of its median exceeds ``SCATTER``. Only against the base do a
few percent matter, and starting a process costs more than the seconds that it times."""
CANARY_FACTOR = 1.10

LIMIT_S = 10.0
"""The most seconds of one comparison in one process on a CPU. A gate may need sixteen processes, so a case that takes
longer is halved, or refused where a budget names it."""
STEPS_OF_LIMIT = 20
"""A smaller case is chosen so that this many steps fit the limit. A race of slow steps has at least six."""

ALLOWED = 1.03
"""The highest ratio to the base's time. On a GPU it is ``SIGMAS`` standard deviations between processes, if less."""
SIGMAS = 3.0

ERROR_OF_ONE = 0.05
"""The relative error that is assumed of a single process: small enough to decide most budgets beside naive."""
SCATTER, SCATTER_FREEDOM = 0.007, 4
"""The relative standard deviation that is expected between processes, and its weight in degrees of freedom. Gates on a
CPU and on an H200 saw 0.4 to 0.9 %. Otherwise two processes would have to agree to 0.5 %."""
STUDENT = {5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}
"""Student's t at 95 %, by degrees of freedom."""

Decision = Literal["within", "over", "undecided"]


@dataclass(frozen=True)
class Spread:
    """The races of several processes, and how far their ratios spread."""

    races: tuple[Race, ...]

    @property
    def ratios(self) -> list[float]:
        return [race.ratio for race in self.races]

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the mean ratio."""
        number = len(self.races)
        half_width = ERROR_OF_ONE * self._mean
        if number > 1:
            half_width = STUDENT[self._freedom] * self.scatter / math.sqrt(number)
        return self._mean - half_width, self._mean + half_width

    @property
    def scatter(self) -> float:
        """The standard deviation between processes, from their ratios and the expected scatter together."""
        squares = SCATTER_FREEDOM * (SCATTER * self._mean) ** 2 + sum((r - self._mean) ** 2 for r in self.ratios)
        return math.sqrt(squares / self._freedom)

    @property
    def _freedom(self) -> int:
        return SCATTER_FREEDOM + len(self.races) - 1

    @property
    def _mean(self) -> float:
        return statistics.fmean(self.ratios)

    def measured(self, against: TimedAgainst, limit: float) -> Ratio:
        """Return the median ratio, with the time that belongs to it."""
        ratio, other_s = median_pair((race.ratio, race.second_s) for race in self.races)
        pairs = sum(race.pairs for race in self.races)
        return Ratio(ratio, other_s, against, limit, pairs, self.interval, len(self.races))


def allowed(comparison: Comparison, device: str, spread: Spread) -> float:
    """Return the highest ratio that passes: the contract's beside naive; against the base ``ALLOWED``, on a GPU less
    where the processes agree well."""
    if comparison.against == "naive" and comparison.timed.times_naive is not None:
        return comparison.timed.times_naive
    return min(ALLOWED, 1 + SIGMAS * spread.scatter) if (comparison.against, device) == ("base", "cuda") else ALLOWED


def decide(spread: Spread, limit: float) -> Decision:
    """Decide by the median, or stay undecided while the limit lies within the interval and more processes may run.

    An odd number above one is undecided too: every second process times the base first.
    """
    number, (low, high) = len(spread.races), spread.interval
    is_open = low <= limit < high or (number > 1 and number % 2 == 1)
    if is_open and number < MOST_PROCESSES:
        return "undecided"
    return "over" if statistics.median(spread.ratios) > limit else "within"
