"""Finds the largest size, or the smallest number of ranks, that fits a GPU by predicted peaks. No GPU is needed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from .errors import MeasurementError, UsageError
from .measure import peak
from .meters.base import Reading, Step, StepBuilder
from .meters.one_rank import Mesh, known_ranks
from .ranks import peak_of_ranks
from .units import format_bytes, parse_bytes

DEFAULT_HIGH = 1 << 24
MOST_RANKS = 1 << 12


@dataclass(frozen=True)
class Tried:
    value: int
    reading: Reading
    capacity_bytes: int

    @property
    def bytes(self) -> int:
        """The bytes at the peak: the tensors before the step, and the step with the allocator's rounding."""
        return self.reading.base_bytes + self.reading.allocated_bytes

    @property
    def fits(self) -> bool:
        return self.bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Fit:
    """The result of a search. ``value`` is the largest that fits, or 0. If ``bounded``, no larger one was allowed.

    In a search over numbers of ranks ``value`` is the smallest number that fits.
    """

    value: int
    capacity_bytes: int
    tried: tuple[Tried, ...]
    bounded: bool
    sought: Literal["largest", "smallest"] = "largest"

    @property
    def easiest(self) -> Tried:
        """The tried value that needs least memory: the smallest, or the largest number of ranks."""
        return (min if self.sought == "largest" else max)(self.tried, key=lambda row: row.value)

    def answer(self, pattern: str) -> str:
        """The largest value in words, by a pattern such as ``N = {:,}`` or ``{:,} tokens``."""
        if not self.value:
            return f"not even {pattern.format(self.easiest.value)}"
        return pattern.format(self.value) + (" (the largest that was allowed)" if self.bounded else "")

    def table(self) -> str:
        """A table of the tried values, in order of size."""
        rows = sorted(self.tried, key=lambda row: row.value)
        width = max(len(f"{row.value:,}") for row in rows)
        return "\n".join(
            f"  {row.value:>{width},}  {format_bytes(row.bytes):>12}  {'fits' if row.fits else 'too much'}"
            + ("" if row.reading.exact else "  (an estimate)")
            for row in rows
        )

    def as_dict(self) -> dict[str, Any]:
        """The answer and all tried values as plain data for JSON."""
        return {
            self.sought: self.value,
            "bounded": self.bounded,
            "capacity_bytes": self.capacity_bytes,
            "tried": [
                {"value": row.value, "bytes": row.bytes, "fits": row.fits, "exact": row.reading.exact}
                for row in self.tried
            ],
        }


class DoesNotFit(MeasurementError):
    """Not even the smallest value fits. ``fit`` has what was tried; its ``value`` is 0."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        easiest = fit.easiest
        which = "the smallest value" if fit.sought == "largest" else "the largest world size"
        super().__init__(
            f"even {which}, {easiest.value}, needs {format_bytes(easiest.bytes)}; the capacity is "
            f"{format_bytes(fit.capacity_bytes)}"
        )


def fit(
    build_of: Callable[[int], StepBuilder],
    capacity: int | str,
    *,
    gpu: str = "H200",
    start: int | None = None,
    low: int = 1,
    high: int = DEFAULT_HIGH,
    multiple_of: int = 1,
    measure: Callable[[StepBuilder], Reading] | None = None,
) -> Fit:
    """The largest value between ``low`` and ``high`` for which ``build_of(value)`` fits in ``capacity``.

    The search starts at ``start``, or at ``low``, and doubles or halves from there; peaks must not fall as the value
    grows. Only multiples of ``multiple_of`` are tried. Where not even ``low`` fits, ``DoesNotFit`` is raised.
    Libraries' own memory (the CUDA context, cuBLAS) is not in the prediction: leave room for it.
    """
    capacity_bytes = bytes_of_capacity(capacity)
    start = low if start is None else start
    if not 1 <= low <= start <= high:
        raise UsageError(f"fit needs 1 <= low <= start <= high, got low={low}, start={start}, high={high}")
    unit = multiple_of
    if unit < 1 or low % unit:
        raise UsageError(f"fit needs a low that is a multiple of multiple_of, got low={low}, multiple_of={unit}")
    measure = measure or partial(peak, gpu=gpu)
    tried: dict[int, Tried] = {}

    def fits(units: int) -> bool:
        value = units * unit
        if value not in tried:
            tried[value] = Tried(value, measure(build_of(value)), capacity_bytes)
        return tried[value].fits

    good, bad = _bracket(fits, start // unit, low // unit, high // unit)
    if good is None:
        raise DoesNotFit(Fit(0, capacity_bytes, tuple(tried.values()), bounded=False))
    while bad is not None and bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return Fit(good * unit, capacity_bytes, tuple(tried.values()), bounded=bad is None)


def fit_growing(
    reading_at: Callable[[int], Reading],
    capacity: int | str,
    *,
    start: int,
    low: int = 1,
    high: int = DEFAULT_HIGH,
    multiple_of: int = 1,
    known: dict[int, Reading] | None = None,
) -> Fit:
    """The same answer as :func:`fit`, with fewer readings if they grow almost linearly.

    A guess is the value at which the line through the nearest readings on both sides reaches the capacity; after two
    guesses on one side, the line through those two. If three guesses have not halved the gap, the growth is not linear
    there, and the middle is tried, or twice the largest that fits where nothing is known that does not.

    ``known`` has the readings of earlier searches, and those of this one are added. If a value fits and a smaller one
    does not, there is no largest value that fits, and an error says so. If not even the lowest fits, the value is 0.
    """
    capacity_bytes = bytes_of_capacity(capacity)
    if not 1 <= multiple_of <= high or not 1 <= low <= high:
        raise UsageError(f"fit needs 1 <= low <= high and multiple_of <= high, got {low}, {high} and {multiple_of}")
    known = {} if known is None else known
    lowest, highest = -(-low // multiple_of), high // multiple_of
    tried: dict[int, Tried] = {}

    def try_units(units: int) -> Tried:
        value = units * multiple_of
        if value not in known:
            known[value] = reading_at(value)
        tried[value] = Tried(value, known[value], capacity_bytes)
        _require_one_limit(tried)
        return tried[value]

    guess = min(max(start // multiple_of, lowest), highest)
    if try_units(guess).fits:
        try_units(max(guess // 2, lowest))  # near enough for a line that holds at larger values
    elif not (smallest := try_units(lowest)).fits:
        return Fit(0, capacity_bytes, (smallest,), bounded=False)
    for value in known:
        if value % multiple_of == 0 and low <= value <= high:
            try_units(value // multiple_of)
    guesses, gaps = list[Tried](), list[int]()
    while True:
        good, bad = _nearest(tried.values())
        gaps.append(highest * multiple_of if bad is None else bad.value - good.value)
        if bad is None and good.value // multiple_of >= highest:
            return Fit(good.value, capacity_bytes, tuple(tried.values()), bounded=True)
        if bad is not None and bad.value - good.value <= multiple_of:
            return Fit(good.value, capacity_bytes, tuple(tried.values()), bounded=False)
        least = good.value // multiple_of + 1
        most = highest if bad is None else bad.value // multiple_of - 1
        if len(gaps) > 3 and 2 * gaps[-1] > gaps[-4]:
            guess = 2 * least if bad is None else (least + most) // 2
        elif len(tried) > 1:
            guess = _next_guess(good, bad, tried.values(), guesses, capacity_bytes) // multiple_of
        guesses.append(try_units(min(max(guess, least), most)))


def fit_world_size(
    build: Callable[..., Step],
    capacity: int | str,
    *,
    mesh: Mesh | None = None,
    high: int = MOST_RANKS,
    **options: Any,
) -> Fit:
    """The smallest number of ranks, doubled from try to try, with which the largest rank's step fits in ``capacity``.

    ``mesh`` has one size of -1, which grows; without it the step is built by ``build(device)``. ``options`` are those
    of :func:`memfix.peak`. If ``high`` ranks are too few, ``DoesNotFit`` is raised.
    """
    if mesh is not None and known_ranks(mesh) is None:
        raise UsageError(f"mesh must have one size of -1, which grows with the number of ranks, got {mesh!r}")

    def reading_at(world_size: int) -> Reading:
        return peak_of_ranks(build, world_size=world_size, mesh=mesh, **options).largest

    found = fit_ranks(reading_at, capacity, low=1 if mesh is None else known_ranks(mesh) or 1, high=high)
    if not found.value:
        raise DoesNotFit(found)
    return found


def fit_ranks(
    reading_at: Callable[[int], Reading], capacity: int | str, *, low: int = 1, high: int = MOST_RANKS
) -> Fit:
    """The smallest of ``low``, twice ``low`` and so on up to ``high`` whose reading fits; 0 if none does.

    Twice as many ranks halve the bytes that ranks share, so all later doublings together save no more than the last
    one did. From 8 times ``low`` on, the search ends where even twice that saving is too little.
    """
    capacity_bytes = bytes_of_capacity(capacity)
    if not 1 <= low <= high:
        raise UsageError(f"high is the most ranks that are tried, at least {low}; got {high}")
    tried: list[Tried] = []
    world_size = low
    while world_size <= high:
        tried.append(Tried(world_size, reading_at(world_size), capacity_bytes))
        if tried[-1].fits:
            return Fit(world_size, capacity_bytes, tuple(tried), bounded=False, sought="smallest")
        if len(tried) > 3 and tried[-1].bytes - 2 * (tried[-2].bytes - tried[-1].bytes) > capacity_bytes:
            break
        world_size *= 2
    return Fit(0, capacity_bytes, tuple(tried), bounded=False, sought="smallest")


def _next_guess(
    good: Tried, bad: Tried | None, tried: Iterable[Tried], guesses: list[Tried], capacity_bytes: int
) -> int:
    if bad is None:
        below = [row for row in tried if row.value < good.value]
        return _on_the_line(max(below, key=lambda row: row.value), good, capacity_bytes)
    if len(guesses) > 1 and guesses[-1].fits == guesses[-2].fits:
        return _on_the_line(guesses[-2], guesses[-1], capacity_bytes)
    return _on_the_line(good, bad, capacity_bytes)


def _nearest(tried: Iterable[Tried]) -> tuple[Tried, Tried | None]:
    """The largest that fits and the smallest that does not."""
    rows = sorted(tried, key=lambda row: row.value)
    return [row for row in rows if row.fits][-1], next((row for row in rows if not row.fits), None)


def _on_the_line(one: Tried, other: Tried, capacity_bytes: int) -> int:
    """The value at which the line through two readings reaches the capacity."""
    grown_bytes = other.bytes - one.bytes
    if grown_bytes == 0:
        return 2 * other.value
    return one.value + (capacity_bytes - one.bytes) * (other.value - one.value) // grown_bytes


def _require_one_limit(tried: Mapping[int, Tried]) -> None:
    rows = [tried[value] for value in sorted(tried)]
    for smaller, larger in itertools.pairwise(rows):
        if larger.fits and not smaller.fits:
            raise MeasurementError(
                f"the peak falls as the value grows: {smaller.value:,} needs {format_bytes(smaller.bytes)} and does "
                f"not fit, {larger.value:,} needs {format_bytes(larger.bytes)} and does"
            )


def _bracket(fits: Callable[[int], bool], start: int, low: int, high: int) -> tuple[int | None, int | None]:
    """Return a value that fits and a larger one that does not; each is None if the bounds contain none."""
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


def bytes_of_capacity(capacity: int | str) -> int:
    try:
        size = parse_bytes(capacity)
    except ValueError as error:
        raise UsageError(f"capacity: {error}") from None
    if size == 0:
        raise UsageError("capacity: nothing fits in 0 bytes")
    return size
