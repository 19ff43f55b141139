"""When a form counts as slower: fresh processes until they can tell, and their own disagreement."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from memfix.gate.timing.rule import ALLOWED, ALLOWED_AT_BEST, MOST_PROCESSES, Spread, allowed_over_base, answer


def spread(*ratios: float) -> Spread:
    return Spread(ratios, 30 * len(ratios), 1e-3, 1e-3)


def test_the_figure_is_the_median_and_its_interval_the_mean_of_processes() -> None:
    found = spread(0.98, 1.0, 1.02, 1.0)
    assert found.ratio == 1.0
    assert (found.low, found.high) == pytest.approx((0.974, 1.026), abs=5e-4)
    assert found.spelled() == "1.000x (0.974 to 1.026; 4 processes, 120 pairs)"


@pytest.mark.parametrize(
    ("ratios", "expected"),
    [
        ((1.0,), "undecided"),
        ((0.5,), "within"),
        ((1.2,), "over"),
        ((1.0, 1.001), "within"),
        ((1.0, 1.02), "undecided"),
        ((1.0, 1.001, 1.0), "undecided"),  # twice in one order, once in the other
        ((1.0, 1.01, 0.99, 1.0), "within"),
        ((1.05, 1.06, 1.04, 1.05), "over"),
        ((1.0, 1.01, 1.2, 1.0), "undecided"),
    ],
)
def test_processes_that_agree_decide_and_others_ask_for_more(ratios: tuple[float, ...], expected: str) -> None:
    assert answer(spread(*ratios), ALLOWED) == expected


def test_after_the_last_process_the_median_decides() -> None:
    mixed = [1.0] * 3 + [1.2] * 5
    assert len(mixed) == MOST_PROCESSES
    assert answer(spread(*mixed), ALLOWED) == "over"
    assert answer(spread(*[1.0] * 5, *[1.2] * 3), ALLOWED) == "within"


def test_a_cpu_allows_3_percent_and_a_quiet_gpu_1() -> None:
    quiet, noisy = (0.9996, 1.0, 1.0006, 1.0001), (1.004, 1.01, 1.0, 1.005)
    assert allowed_over_base("cpu", quiet) == ALLOWED
    assert allowed_over_base("cuda", quiet) == ALLOWED_AT_BEST
    assert ALLOWED_AT_BEST < allowed_over_base("cuda", noisy) < ALLOWED
    assert allowed_over_base("cuda", (0.95, 1.05)) == allowed_over_base("cuda", (1.0,)) == ALLOWED


def asked(read: Callable[[], float], device: str) -> tuple[bool, int]:
    """Whether processes that read this say over, and how many it took."""
    ratios: list[float] = []
    while True:
        ratios.append(read())
        limit = allowed_over_base(device, ratios)
        word = answer(spread(*ratios), limit)
        if word != "undecided":
            return word == "over", len(ratios)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("sigma", [0.0005, 0.004, 0.01])
def test_identical_code_is_let_pass_and_5_percent_are_not(sigma: float, device: str) -> None:
    """With processes that scatter as measured: on a quiet GPU, a quiet CPU, and a launch-bound step."""
    draw = random.Random(0)

    def fails(slowdown: float) -> bool:
        return all(asked(lambda: draw.gauss(slowdown, sigma), device)[0] for _ in range(2))

    assert sum(fails(1.0) for _ in range(2000)) <= 2
    assert sum(fails(1.05) for _ in range(2000)) >= 1990


def test_what_is_clear_takes_few_processes() -> None:
    draw = random.Random(0)
    numbers = [asked(lambda: draw.gauss(1.0, 0.004), "cpu")[1] for _ in range(1000)]
    assert sum(numbers) / len(numbers) < 3.5
