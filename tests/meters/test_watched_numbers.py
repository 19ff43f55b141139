"""Comparisons of unknown numbers: a reading is exact only if each came out both ways with the same bytes."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import memfix
from memfix.meters.simulated.watched_numbers import WatchedFloat, WatchedInt

BRANCH = 20_000_000


def reading_of(takes_branch: Callable[[torch.Tensor], object]) -> memfix.Reading:
    """The reading of a step that allocates ``BRANCH`` bytes if the function of a large tensor says so."""

    def build(device: str) -> Callable[[], object]:
        x = torch.randn(1000, 1000, device=device)

        def step() -> object:
            return torch.empty(BRANCH, dtype=torch.uint8, device=device) if takes_branch(x) else None

        return step

    return memfix.peak(build)


def mean_square(x: torch.Tensor) -> Any:
    return x.square().mean().item()


@pytest.mark.parametrize(
    "takes_branch",
    [
        pytest.param(lambda x: 0.9 < mean_square(x) < 1.1, id="a window that no assumed number is in"),
        pytest.param(lambda x: round(mean_square(x)) == 1, id="a rounded number"),
        pytest.param(lambda x: mean_square(x) == mean_square(x), id="the same number computed twice"),
        pytest.param(lambda x: mean_square(x) / mean_square(x) > 3, id="a ratio of assumed numbers"),
        pytest.param(lambda x: mean_square(x) * -mean_square(x) > 0, id="a product of a sign that no run has"),
        pytest.param(lambda x: math.isinf(mean_square(x)), id="a number that is infinite"),
        pytest.param(lambda x: x.sum(0)[:8].argmax().item() == 5, id="a choice"),
        pytest.param(lambda x: x.sum(0)[:3].tolist()[0] == 7.0, id="a number in a list"),
        pytest.param(lambda x: sorted([mean_square(x), 3.0, mean_square(x)])[1] != 3.0, id="the order of numbers"),
    ],
)
def test_a_branch_that_no_assumed_number_takes_is_within_the_bounds(takes_branch: Callable[..., Any]) -> None:
    reading = reading_of(takes_branch)
    assert not reading.exact
    assert reading.at_most is None or reading.at_most >= BRANCH


def test_numbers_that_are_only_logged_leave_a_reading_exact() -> None:
    history: list[Any] = []

    def log(x: torch.Tensor) -> bool:
        history.append(f"{mean_square(x):.3f}")
        history.append(sum([mean_square(x), 2]) / 2)
        return False

    assert reading_of(log).exact


def test_a_comparison_that_changes_no_bytes_leaves_a_reading_exact() -> None:
    best = [math.inf]

    def keep_best(x: torch.Tensor) -> bool:
        best[0] = min(best[0], mean_square(x))
        return False

    assert reading_of(keep_best).exact


def test_an_outcome_under_which_the_step_raises_is_left_out() -> None:
    def checked(x: torch.Tensor) -> bool:
        if 3e5 < mean_square(x) < 4e5:
            raise ValueError("an unlikely loss")
        return False

    assert reading_of(checked).exact


@pytest.mark.parametrize("number", [WatchedFloat(2.5), WatchedInt(3)])
def test_a_watched_number_is_a_number_outside_of_a_simulation(number: Any) -> None:
    plain = float(number) if isinstance(number, float) else int(number)
    assert (number == plain, number < plain + 1, number != plain, bool(number)) == (True, True, False, True)
    assert (number + 1, 1.5 * number, number / 2, -number, round(number)) == (
        plain + 1, 1.5 * plain, plain / 2, -plain, round(plain)
    )  # fmt: skip
    assert {number: 1}[plain] == 1
    assert f"{number:.2f}" == f"{plain:.2f}"
    assert str(number) == str(plain)
    assert pickle.loads(pickle.dumps(number)) == copy.deepcopy(number) == plain
    assert torch.tensor(number).item() == plain
    assert torch.ones(1).mul(number).item() == plain
