"""When a form counts as slower. Pure: ratios in, a verdict out; imports no torch.

A process gives one ratio, the median over its pairs, because what a process happens to be dealt (addresses, cores,
clocks) stays with it. So processes are what is sampled, one after the other, until they can tell: while the limit lies
inside the interval of their mean, more are asked, and after the last of them their median decides.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

from .timing_plan import BASE, CANARY, NAIVE_FORM

MOST_PROCESSES = 8
SAMPLE_S, MOST_PAIRS = 0.001, 400
"""Many short samples: what disturbs a pair outlasts a sample of any length, so a second of short ones says more."""
RACE_S = {BASE: (1.0, 2.0), NAIVE_FORM: (0.4, 0.4), CANARY: (0.4, 0.4)}
"""How long a race takes, and how long at most while its own pairs leave its median in doubt by more than ``SCATTER``. A
few percent must be seen against base only; there a process that is started has cost more than the seconds it times."""
CANARY_FACTOR = 1.10

ALLOWED = 1.03
"""Over base. On a GPU it comes down to so many ``SIGMAS`` of what the processes scatter by."""
SIGMAS = 3.0

ROUGHLY = 0.05
"""What the word of a single process is good to: enough for most budgets beside naive, and for no few percents."""
SCATTER, SCATTER_WORTH = 0.007, 4
"""What processes scatter by before any has shown it, and how many degrees of freedom that is worth. Gates on a CPU and
on an H200 saw 0.4 to 0.9 %; two processes say little of it, and on their word alone had to agree to half a percent."""
STUDENT = {5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26, 10: 2.23, 11: 2.20}
"""Student's t at 95 %, by degrees of freedom."""

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
        return self._middle - self._half_width

    @property
    def high(self) -> float:
        return self._middle + self._half_width

    @property
    def scatter(self) -> float:
        """One standard deviation between processes, of what they show and what was expected of them."""
        squares = SCATTER_WORTH * (SCATTER * self._middle) ** 2 + sum((r - self._middle) ** 2 for r in self.ratios)
        return math.sqrt(squares / self._freedom)

    @property
    def _freedom(self) -> int:
        return SCATTER_WORTH + len(self.ratios) - 1

    @property
    def _middle(self) -> float:
        return statistics.fmean(self.ratios)

    @property
    def _half_width(self) -> float:
        number = len(self.ratios)
        if number == 1:
            return ROUGHLY * self._middle
        return STUDENT[self._freedom] * self.scatter / math.sqrt(number)

    def spelled(self) -> str:
        processes = f"{len(self.ratios)} process{'es' if len(self.ratios) > 1 else ''}"
        return f"{self.ratio:.3f}x ({self.low:.3f} to {self.high:.3f}; {processes}, {self.pairs} pairs)"


def allowed_over_base(device: str, spread: Spread) -> float:
    """How far a form may be above its own time at base; on a GPU by how well the processes agree."""
    return ALLOWED if device == "cpu" else min(ALLOWED, 1 + SIGMAS * spread.scatter)


def answer(spread: Spread, limit: float) -> Answer:
    """Undecided while the limit lies within the interval and more processes may still be asked.

    An odd number of them, but one, is undecided too: every other one begins with the base.
    """
    number = len(spread.ratios)
    is_open = spread.low <= limit < spread.high or (number > 1 and number % 2 == 1)
    if is_open and number < MOST_PROCESSES:
        return "undecided"
    return "over" if spread.ratio > limit else "within"
