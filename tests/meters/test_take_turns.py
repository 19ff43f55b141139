"""Steps that are timed in turns: rounds rotate, end when they should, and go on without one that fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from memfix.meters.clock import Rounds, take_turns

TWO = Rounds(least=2, most=2)


def turns(steps: dict[str, Callable[[], object]], rounds: Rounds = TWO, **more: Any) -> Any:
    given: dict[str, Any] = {"failed": lambda name, error: pytest.fail(str(error)), "settle_s": 0.0, "sample_s": 0.0}
    return take_turns(steps, device="cpu", rounds=rounds, **{**given, **more})


def test_every_step_runs_once_a_round_and_the_first_of_a_round_rotates() -> None:
    calls: list[str] = []
    names = ("a", "b", "c")
    found = turns({name: lambda name=name: calls.append(name) for name in names}, Rounds(4, 4))  # type: ignore[misc]
    timed = calls[1::2]  # each comes after an untimed one
    assert calls[::2] == timed
    rounds = [tuple(timed[start : start + 3]) for start in range(0, len(timed), 3)]
    assert rounds == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b"), ("a", "b", "c")]
    assert {len(times.times_s) for times in found.values()} == {4}


@pytest.mark.parametrize(
    ("number", "took_s", "done"), [(2, 100, False), (3, 15, False), (3, 16, True), (9, 15, False), (10, 1, True)]
)
def test_rounds_end_by_time_but_not_before_the_least_and_by_the_most(number: int, took_s: float, done: bool) -> None:
    assert Rounds(least=3, most=10, seconds=16).are_done(number, took_s) is done


def test_one_that_fails_leaves_the_rounds_and_the_others_go_on() -> None:
    calls, failures = 0, []

    def tiring() -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("no more")

    steps = {"tiring": tiring, "steady": lambda: None}
    found = turns(steps, Rounds(5, 5), failed=lambda name, error: failures.append((name, str(error))))
    assert failures == [("tiring", "no more")]
    assert len(found["tiring"].times_s) == 1
    assert len(found["steady"].times_s) == 5
    assert calls == 4


def test_a_sample_is_the_mean_over_steps_that_fill_its_time_after_steps_that_settle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, calls = 0.0, 0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)

    def of_ten_milliseconds() -> None:
        nonlocal now_s, calls
        now_s += 0.010
        calls += 1

    found = turns({"a": of_ten_milliseconds}, settle_s=0.025, sample_s=0.035)["a"]
    assert found.repeats == 4
    assert found.times_s == pytest.approx([0.010, 0.010])
    assert found.median_s == pytest.approx(0.010)
    assert calls == 2 * (3 + 4)


def test_each_sample_may_be_prepared() -> None:
    calls: list[str] = []
    turns({"a": lambda: calls.append("a")}, before_each=lambda: calls.append("prepared"))
    assert calls == ["prepared", "a", "a"] * 2
