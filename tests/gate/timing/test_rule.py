"""When a form counts as slower: the median of fresh processes, and their own disagreement."""

from __future__ import annotations

import random
import statistics

import pytest

from memfix.gate.timing.rule import (
    ALLOWED,
    ALLOWED_AT_BEST,
    MOST_PROCESSES,
    PROCESSES,
    Spread,
    allowed_over_base,
    answer,
)


def spread(*ratios: float) -> Spread:
    return Spread(ratios, 30 * len(ratios), 1e-3, 1e-3)


def test_the_figure_is_the_median_and_its_interval_all_processes() -> None:
    found = spread(1.0, 1.02, 0.99, 1.5, 1.01)
    assert (found.ratio, found.low, found.high) == (1.01, 0.99, 1.5)
    assert found.spelled() == "1.010x (0.990 to 1.500; 5 processes, 150 pairs)"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.0, 1.01, 0.99, 1.0, 1.02), "within"),
        ((1.05, 1.06, 1.04, 1.05, 1.05), "over"),
        ((1.0, 1.01, 1.2, 1.0, 1.02), "undecided"),
        ((1.04, 1.05, 1.02, 1.06, 1.05), "undecided"),
    ],
)
def test_processes_that_agree_decide_and_others_ask_for_more(ratios: tuple[float, ...], expected: str) -> None:
    assert answer(spread(*ratios), ALLOWED) == expected


def test_after_the_last_process_the_median_decides() -> None:
    mixed = [1.0] * 4 + [1.2] * 5
    assert len(mixed) == MOST_PROCESSES
    assert answer(spread(*mixed), ALLOWED) == "over"
    assert answer(spread(*[1.0] * 5, *[1.2] * 4), ALLOWED) == "within"


def test_a_cpu_allows_3_percent_and_a_quiet_gpu_1() -> None:
    quiet, noisy = (0.9996, 1.0, 1.0006, 1.0001, 0.9999), (0.987, 1.01, 1.0, 0.99, 1.005)
    assert allowed_over_base("cpu", quiet) == ALLOWED
    assert allowed_over_base("cuda", quiet) == ALLOWED_AT_BEST
    assert ALLOWED_AT_BEST < allowed_over_base("cuda", noisy) <= ALLOWED
    assert allowed_over_base("cuda", (1.0,)) == ALLOWED


@pytest.mark.parametrize("sigma", [0.0005, 0.004, 0.01])
def test_identical_code_is_let_pass_and_5_percent_are_not(sigma: float) -> None:
    """With processes that scatter as measured: on a quiet GPU, a quiet CPU, and a launch-bound step."""
    draw = random.Random(0)

    def says_over(slowdown: float) -> bool:
        ratios = [draw.gauss(slowdown, sigma) for _ in range(PROCESSES)]
        return statistics.median(ratios) > allowed_over_base("cuda", ratios)

    alarms = sum(says_over(1.0) and says_over(1.0) for _ in range(2000))
    found = sum(says_over(1.05) and says_over(1.05) for _ in range(2000))
    assert alarms <= 2
    assert found >= 1950
