"""Times steps alternately in one process, so that a disturbance hits all of them alike.

``race`` times two steps in pairs, ``take_turns`` any number of steps in rounds.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from .base import Step
from .garbage import only_our_own_cycles

LEAST_PAIRS = 2
"""The fewest pairs of a race: with two, each step is once the first of a pair."""
_CYCLES = 1_000_000  # GPU clock cycles of a sleep whose time is measured


@dataclass(frozen=True)
class Race:
    """Two steps timed alternately. ``ratio`` is the first step's time over the second's, the median of all pairs.

    ``second_s`` is the second step's time in the median pair, so that it agrees with ``ratio``.
    """

    ratio: float
    second_s: float
    pairs: int


def median_pair(pairs: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The median of ``(ratio, time)`` pairs by ratio, with the time of that pair.

    For an even number of pairs, both are the mean of the two in the middle.
    """
    ranked = sorted(pairs)
    half = (len(ranked) - 1) // 2
    ratios, times = zip(*ranked[half : len(ranked) - half], strict=True)
    return statistics.fmean(ratios), statistics.fmean(times)


def race(
    first: Step,
    second: Step,
    *,
    device: str,
    pairs: int = 15,
    sample_s: float = 0.0,
    enough_s: float = math.inf,
    most_s: float = math.inf,
    max_error: float = 0.0,
    second_begins: bool = False,
) -> Race:
    """Time ``first`` and ``second`` in ABBA order, or in BAAB order where ``second_begins``.

    A sample is as many consecutive steps as fill ``sample_s``, the same number for both. After ``enough_s`` seconds the
    race may end before ``pairs`` are timed, if the median's relative standard error is at most ``max_error``; after
    ``most_s`` seconds it ends in any case. It has at least ``LEAST_PAIRS`` pairs.
    """
    steps = (first, second)
    order = (1, 0) if second_begins else (0, 1)
    with only_our_own_cycles():
        for which in order:  # a first call may compile or build caches, and a GPU that idled is 4 % faster
            _elapsed_s(steps[which], device, 1)
        begin = time.perf_counter()
        once = {which: _elapsed_s(steps[which], device, 1) for which in order}
        longest_s = max(once.values())
        repeats = max(1, math.ceil(sample_s / longest_s)) if longest_s > 0 else 1
        times = ([once[0]], [once[1]]) if repeats == 1 else ([], [])  # the probe was already a full sample
        for pair in range(len(times[0]), pairs):
            is_forward = pair % 2 == 0
            if pair >= LEAST_PAIRS and is_forward:
                took_s = time.perf_counter() - begin
                if took_s > most_s or (took_s > enough_s and _relative_error(_ratios(times)) <= max_error):
                    break
            for which in order if is_forward else reversed(order):
                times[which].append(_elapsed_s(steps[which], device, repeats) / repeats)
    return Race(*median_pair(zip(_ratios(times), times[1], strict=True)), len(times[1]))


@dataclass(frozen=True)
class Rounds:
    """The number of rounds to time: at least ``least``, then more until ``seconds`` have passed, at most ``most``."""

    least: int = 3
    most: int = 10
    seconds: float = 16.0

    def are_done(self, number: int, took_s: float) -> bool:
        return number >= self.most or (number >= self.least and took_s >= self.seconds)


@dataclass
class Times:
    """The samples of one step: the mean seconds per step in each sample, and the number of steps in the last one."""

    times_s: list[float] = field(default_factory=list)
    repeats: int = 1

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def take_turns(
    steps: Mapping[str, Step],
    *,
    device: str,
    rounds: Rounds,
    failed: Callable[[str, Exception], None],
    sample_s: float = 0.05,
    settle_s: float = 0.25,
    before_each: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Time every step once per round, in an order that rotates.

    A sample is as many consecutive steps as fill ``sample_s``. On a GPU the next step is launched while the last one
    runs, as in a training loop. Untimed steps run for ``settle_s`` first, because a GPU that has just idled is faster
    until it nears its power limit. If a step raises, ``failed`` is called and later rounds skip that step.
    """
    found = {name: Times() for name in steps}
    running, number, begin = list(steps), 0, time.perf_counter()
    with only_our_own_cycles():
        while running and not rounds.are_done(number, time.perf_counter() - begin):
            first = number % len(running)
            for name in (*running[first:], *running[:first]):
                gc.collect()  # between samples, so that no timed step pays for it
                try:
                    before_each()
                    _take_sample(found[name], steps[name], device, sample_s, settle_s)
                except Exception as error:
                    failed(name, error)
                    running = [other for other in running if other != name]
            number += 1
    return found


def _take_sample(times: Times, step: Step, device: str, sample_s: float, settle_s: float) -> None:
    shortest_s, end = math.inf, time.perf_counter() + settle_s
    while shortest_s == math.inf or time.perf_counter() < end:
        shortest_s = min(shortest_s, _elapsed_s(step, device, 1))
    times.repeats = max(1, math.ceil(sample_s / shortest_s)) if shortest_s > 0 else 1
    times.times_s.append(_elapsed_s(step, device, times.repeats) / times.repeats)


def slowed(step: Step, factor: float, device: str) -> Step:
    """``step`` slowed down to ``factor`` times its time, to test whether a time check notices it.

    The CPU waits in proportion to the time of each call. A GPU runs asynchronously, so it sleeps in proportion to the
    usual time of a step.
    """
    cycles = 0
    if device.startswith("cuda"):
        import torch

        cycle_s = _usual_s(lambda: torch.cuda._sleep(_CYCLES), device) / _CYCLES
        cycles = round((factor - 1) * _usual_s(step, device) / cycle_s)

    def slower() -> object:
        start = time.perf_counter()
        result = step()
        if cycles:
            torch.cuda._sleep(cycles)
        end = start + factor * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return result

    return slower


def _ratios(times: tuple[list[float], list[float]]) -> list[float]:
    return [a / b for a, b in zip(*times, strict=True)]


def _relative_error(ratios: list[float]) -> float:
    """The relative standard error of the median: half the distance between the two ranks that bound the median."""
    ranked, middle, reach = sorted(ratios), (len(ratios) - 1) / 2, math.sqrt(len(ratios)) / 2
    low, high = ranked[max(0, math.floor(middle - reach))], ranked[min(len(ranked) - 1, math.ceil(middle + reach))]
    return (high - low) / 2 / statistics.median(ranked)


def _usual_s(step: Step, device: str) -> float:
    """The median time of several calls; the minimum would make ``slowed`` wait too short."""
    _elapsed_s(step, device, 1)
    return statistics.median(_elapsed_s(step, device, 1) for _ in range(7))


def _elapsed_s(step: Step, device: str, repeats: int) -> float:
    """The seconds that ``repeats`` steps in a row take, until their kernels have finished."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        for _ in range(repeats):
            step()
        return time.perf_counter() - start
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for _ in range(repeats):
        step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
