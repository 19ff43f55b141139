"""Two steps in turn: their ratio, how long a sample is, and a slowdown that is known. The clock is scripted."""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable

import pytest

from memfix.meters import clock
from memfix.meters.clock import LEAST_PAIRS, race, slowed


class Clock:
    """Stands still but for steps that say how long they take, and for a nanosecond at every reading."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def read(self) -> float:
        self._now_s += 1e-9
        return self._now_s

    def step(self, seconds: float, name: str = "", log: list[str] | None = None) -> Callable[[], str]:
        """Takes so long, writes its name into the log and gives it."""

        def taken() -> str:
            self._now_s += seconds
            if log is not None:
                log.append(name)
            return name

        return taken


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "perf_counter", made.read)
    return made


@pytest.mark.parametrize(("second_begins", "order"), [(False, "ab ab ba ab ba"), (True, "ba ba ab ba ab")])
def test_pairs_come_in_turns_and_change_sides(scripted: Clock, second_begins: bool, order: str) -> None:
    log: list[str] = []
    steps = scripted.step(1e-4, "a", log), scripted.step(1e-4, "b", log)
    race(*steps, device="cpu", pairs=4, second_begins=second_begins)
    assert "".join(log) == order.replace(" ", "")


@pytest.mark.parametrize("second_begins", [False, True])
def test_the_ratio_is_of_the_first_over_the_second(scripted: Clock, second_begins: bool) -> None:
    found = race(scripted.step(3e-4), scripted.step(1e-4), device="cpu", pairs=21, second_begins=second_begins)
    assert found.ratio == pytest.approx(3, rel=1e-3)
    assert found.second_s == pytest.approx(1e-4, rel=1e-3)


@pytest.mark.parametrize(
    ("times", "second_s"),
    [
        # the medians of either column are 330 and 7.42, which would be 44 times
        ([(330.0, 60.0), (336.0, 7.42), (7.0, 7.0)], 60.0),
        ([(2.0, 1.0), (9.0, 1.0), (12.0, 3.0), (1.0, 1.0)], 2.0),  # the two in the middle: 2 and 4 times
    ],
)
def test_the_time_is_that_of_the_ratio(
    monkeypatch: pytest.MonkeyPatch, times: list[tuple[float, float]], second_s: float
) -> None:
    samples = {"first": iter([0.0, *(a for a, _ in times)]), "second": iter([0.0, *(b for _, b in times)])}
    monkeypatch.setattr(clock, "_elapsed_s", lambda step, device, repeats: next(samples[step()]))
    found = race(lambda: "first", lambda: "second", device="cpu", pairs=len(times))
    assert found.second_s == pytest.approx(second_s)
    assert found.ratio == pytest.approx(statistics.median(a / b for a, b in times))


def test_a_short_step_is_repeated_until_a_sample_is_long_enough(scripted: Clock) -> None:
    log: list[str] = []
    steps = scripted.step(1e-4, "a", log), scripted.step(1e-4, "b", log)
    found = race(*steps, device="cpu", pairs=2, sample_s=2e-3)
    first_time, to_see_how_long_it_takes = 1, 1
    assert log.count("a") == first_time + to_see_how_long_it_takes + 2 * 20
    assert found.second_s == pytest.approx(1e-4, rel=1e-3)  # of one step, not of the sample


def test_long_steps_have_fewer_pairs_but_not_too_few(scripted: Clock) -> None:
    long = scripted.step(2e-3)
    found = race(long, long, device="cpu", pairs=30, most_s=0.059)
    assert found.pairs == 16  # 15 pairs take so long, and there are as many in one order as in the other
    assert race(long, scripted.step(0.0), device="cpu", pairs=30, most_s=0.0).pairs == LEAST_PAIRS


@pytest.mark.parametrize(
    ("lengths", "pairs"),
    [
        ((1e-3,), 10),  # they agree: enough
        ((1e-3, 3e-3, 9e-3), 100),  # they do not: up to the most
    ],
)
def test_a_race_goes_on_while_its_own_pairs_leave_its_median_in_doubt(
    monkeypatch: pytest.MonkeyPatch, lengths: tuple[float, ...], pairs: int
) -> None:
    now, length = 0.0, itertools.cycle(lengths)

    def timed(step: object, device: str, repeats: int) -> float:
        nonlocal now
        now += 1e-3
        return next(length)

    monkeypatch.setattr(clock, "_elapsed_s", timed)
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    found = race(lambda: None, lambda: None, device="cpu", pairs=1000, enough_s=0.019, most_s=0.199, max_error=0.01)
    assert found.pairs == pairs


def test_a_median_is_in_doubt_by_its_standard_error() -> None:
    draw = random.Random(0)
    medians, errors = [], []
    for _ in range(400):
        ratios = [draw.gauss(1.0, 0.1) for _ in range(40)]
        medians.append(statistics.median(ratios))
        errors.append(clock._relative_error(ratios))
    assert statistics.fmean(errors) == pytest.approx(statistics.stdev(medians), rel=0.25)
    assert clock._relative_error([1.0, 1.0]) == 0.0
    assert clock._relative_error([1.0, 2.0]) == pytest.approx(1 / 3)


@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_a_slowed_step_takes_its_factor_longer_and_gives_what_it_gave(scripted: Clock, factor: float) -> None:
    step = scripted.step(5e-6, "result")
    slower = slowed(step, factor, "cpu")
    assert slower() == "result"
    assert race(slower, step, device="cpu", pairs=31).ratio == pytest.approx(factor, rel=0.01)


def test_no_garbage_is_collected_in_a_race() -> None:
    assert gc.isenabled()
    during: list[bool] = []
    race(lambda: during.append(gc.isenabled()), lambda: None, device="cpu", pairs=3)
    assert during == [False] * 4
    assert gc.isenabled()
