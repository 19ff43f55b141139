"""When a form counts as slower: fresh processes until they can tell, and their own disagreement."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memfix.gate.timing.rule import ALLOWED, MOST_PROCESSES, Spread, allowed, decide
from memfix.gate.timing.timing_plan import Comparison, TimedForm
from memfix.meters.clock import Race

AGAINST_BASE = Comparison(TimedForm("chunked", "small", "train"), "base")


def spread(*ratios: float) -> Spread:
    return Spread(tuple(Race(ratio, 1e-3, 30) for ratio in ratios))


def test_the_figure_is_the_median_and_its_interval_the_mean_of_processes() -> None:
    found = spread(0.98, 1.0, 1.02, 1.0)
    measured = found.measured("base", ALLOWED)
    assert measured.ratio == 1.0
    assert measured.interval == pytest.approx((0.986, 1.014), abs=5e-4)
    assert measured.spelled() == "1.000x (0.986 to 1.014; 4 processes, 120 pairs)"


def test_the_times_are_those_of_the_process_with_the_median_ratio() -> None:
    slow_machine, usual, disturbed = Race(5.5, 0.061, 30), Race(1.0, 0.3, 30), Race(45.0, 0.007, 30)
    measured = Spread((slow_machine, usual, disturbed)).measured("naive", 2.0)
    assert (measured.ratio, measured.other_s, measured.seconds) == (5.5, 0.061, pytest.approx(0.3355))


def test_the_two_times_of_a_message_are_those_of_its_ratio() -> None:
    draw = random.Random(0)
    for number in range(200):
        races = tuple(
            Race(draw.lognormvariate(0, 2), draw.lognormvariate(-5, 3), 30) for _ in range(1 + number % MOST_PROCESSES)
        )
        message = Spread(races).measured("naive", 2.0).message("naive's time", "cpu")
        ratio = float(message.split()[1].removesuffix("x"))
        own_s, naive_s = (parse_seconds(time) for time in message.rpartition("(")[2].rstrip(")").split(" against "))
        assert own_s / naive_s == pytest.approx(ratio, rel=0.02, abs=6e-4), message


def parse_seconds(text: str) -> float:
    number, unit = text.split()
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}[unit]


def test_processes_that_happen_to_agree_are_expected_to_scatter_all_the_same() -> None:
    assert spread(1.0, 1.0).interval[1] == pytest.approx(1.011, abs=5e-4)
    assert spread(1.0, 1.0).scatter > spread(*[1.0] * 8).scatter > 0.004
    assert spread(0.02, 0.02).scatter == pytest.approx(0.02 * spread(1.0, 1.0).scatter)
    assert spread(0.9, 1.1, 0.9, 1.1).scatter > 0.07  # and what they show counts for as much as it is


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.0,), "undecided"),
        ((0.5,), "within"),
        ((1.2,), "over"),
        ((1.0, 1.001), "within"),
        ((1.0, 1.03), "undecided"),
        ((1.0, 1.001, 1.0), "undecided"),  # twice in one order, once in the other
        ((1.0, 1.01, 0.99, 1.0), "within"),
        ((1.05, 1.06, 1.04, 1.05), "over"),
        ((1.0, 1.01, 1.2, 1.0), "undecided"),
    ],
)
def test_processes_that_agree_decide_and_others_ask_for_more(ratios: tuple[float, ...], expected: str) -> None:
    assert decide(spread(*ratios), ALLOWED) == expected


def test_after_the_last_process_the_median_decides() -> None:
    mixed = [1.0] * 3 + [1.2] * 5
    assert len(mixed) == MOST_PROCESSES
    assert decide(spread(*mixed), ALLOWED) == "over"
    assert decide(spread(*[1.0] * 5, *[1.2] * 3), ALLOWED) == "within"


def test_a_cpu_allows_3_percent_and_a_quiet_gpu_less() -> None:
    quiet, noisy = spread(0.9996, 1.0, 1.0006, 1.0001), spread(0.95, 1.05)
    assert allowed(AGAINST_BASE, "cpu", quiet) == ALLOWED
    assert 1.01 < allowed(AGAINST_BASE, "cuda", quiet) < 1.02
    assert allowed(AGAINST_BASE, "cuda", spread(1.0)) == pytest.approx(1.021)
    assert allowed(AGAINST_BASE, "cuda", noisy) == ALLOWED


def asked(read: Callable[[], float], device: str) -> tuple[bool, int]:
    """Whether processes that read this say over, and how many it took."""
    ratios: list[float] = []
    while True:
        ratios.append(read())
        found = spread(*ratios)
        word = decide(found, allowed(AGAINST_BASE, device, found))
        if word != "undecided":
            return word == "over", len(ratios)


def scattered(sigma: float, disturbed: float, draw: random.Random) -> Callable[[float], float]:
    """A process's word of a slowdown: off by ``sigma``, and as often as ``disturbed`` by up to 4 % more."""

    def read(slowdown: float) -> float:
        shock = draw.choice((-1, 1)) * draw.uniform(0.01, 0.04) if draw.random() < disturbed else 0.0
        return slowdown * (draw.gauss(1.0, sigma) + shock)

    return read


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("sigma", "disturbed", "found"),
    [(0.0005, 0.0, 2000), (0.004, 0.0, 2000), (0.01, 0.0, 1998), (0.015, 0.0, 1985), (0.005, 0.15, 1990)],
)
def test_identical_code_is_let_pass_and_5_percent_are_not(
    sigma: float, disturbed: float, found: int, device: str
) -> None:
    """With processes that scatter as a quiet GPU, a quiet CPU and a launch-bound step do; by half more; with tails."""
    read = scattered(sigma, disturbed, random.Random(0))

    def fails(slowdown: float) -> bool:
        return all(asked(lambda: read(slowdown), device)[0] for _ in range(2))

    assert sum(fails(1.0) for _ in range(2000)) <= 1
    assert sum(fails(1.05) for _ in range(2000)) >= found


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize(("slowdown", "at_most"), [(1.0, 2.3), (1.05, 2.3), (1.1, 1.5)])
def test_what_is_clear_takes_two_processes(device: str, slowdown: float, at_most: float) -> None:
    read = scattered(0.006, 0.0, random.Random(0))
    numbers = [asked(lambda: read(slowdown), device)[1] for _ in range(1000)]
    assert sum(numbers) / len(numbers) < at_most
