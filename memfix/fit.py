"""The largest size that fits: bisection over predicted peaks, on a GPU that need not be there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .errors import MeasurementError, UsageError
from .measure import peak
from .meters.base import Reading, StepBuilder
from .units import format_bytes, parse_bytes

DEFAULT_HIGH = 1 << 24


@dataclass(frozen=True)
class Tried:
    value: int
    reading: Reading
    capacity_bytes: int

    @property
    def bytes(self) -> int:
        """What the process needs at the peak: its tensors before the step, and the step as the allocator rounds it."""
        return self.reading.base_bytes + self.reading.allocated_bytes

    @property
    def fits(self) -> bool:
        return self.bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Fit:
    """``value`` is the largest that fits; ``bounded`` says that nothing larger was allowed to be tried."""

    value: int
    capacity_bytes: int
    tried: tuple[Tried, ...]
    bounded: bool

    def table(self) -> str:
        """What was tried, in order of size."""
        rows = sorted(self.tried, key=lambda row: row.value)
        width = max(len(f"{row.value:,}") for row in rows)
        return "\n".join(
            f"  {row.value:>{width},}  {format_bytes(row.bytes):>12}  {'fits' if row.fits else 'too much'}"
            + ("" if row.reading.exact else "  (an estimate)")
            for row in rows
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            "largest": self.value,
            "bounded": self.bounded,
            "capacity_bytes": self.capacity_bytes,
            "tried": [
                {"value": row.value, "bytes": row.bytes, "fits": row.fits, "exact": row.reading.exact}
                for row in self.tried
            ],
        }


def fit(
    build_of: Callable[[int], StepBuilder],
    capacity: int | str,
    *,
    gpu: str = "H200",
    start: int | None = None,
    low: int = 1,
    high: int = DEFAULT_HIGH,
    measure: Callable[[StepBuilder], Reading] | None = None,
) -> Fit:
    """The largest value between ``low`` and ``high`` for which ``build_of(value)`` fits in ``capacity``.

    The search starts at ``start``, or at ``low``, and doubles or halves from there; peaks must not fall as the value
    grows.
    Libraries' own memory (the CUDA context, cuBLAS) is not in the prediction: leave room for it.
    """
    capacity_bytes = _capacity(capacity)
    start = low if start is None else start
    if not 1 <= low <= start <= high:
        raise UsageError(f"fit needs 1 <= low <= start <= high, got low={low}, start={start}, high={high}")
    if measure is None:

        def measure(build: StepBuilder) -> Reading:
            return peak(build, gpu=gpu)

    tried: dict[int, Tried] = {}

    def fits(value: int) -> bool:
        if value not in tried:
            tried[value] = Tried(value, measure(build_of(value)), capacity_bytes)
        return tried[value].fits

    good, bad = _bracket(fits, start, low, high)
    if good is None:
        smallest = tried[low]
        raise MeasurementError(
            f"even the smallest value, {low}, needs {format_bytes(smallest.bytes)}; the capacity is "
            f"{format_bytes(capacity_bytes)}"
        )
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return Fit(good, capacity_bytes, tuple(tried.values()), bounded=bad is None)


def _bracket(fits: Callable[[int], bool], start: int, low: int, high: int) -> tuple[int | None, int | None]:
    """A value that fits and a larger one that does not; None for one that is not there within the bounds."""
    if fits(start):
        good = start
        while good < high:
            larger = min(2 * good, high)
            if not fits(larger):
                return good, larger
            good = larger
        return good, None
    bad = start
    while bad > low:
        smaller = max(bad // 2, low)
        if fits(smaller):
            return smaller, bad
        bad = smaller
    return None, bad


def _capacity(capacity: int | str) -> int:
    try:
        size = parse_bytes(capacity)
    except ValueError as error:
        raise UsageError(f"capacity: {error}") from None
    if size == 0:
        raise UsageError("capacity: nothing fits in 0 bytes")
    return size
