"""What a finding measured: its figures in JSON and back, and times that agree with their ratio."""

from __future__ import annotations

import json

import pytest

from memfix.checks import speed
from memfix.checks.finding import Finding
from memfix.checks.measured import Agreement, Bytes, Growth, Measured, Ratio, SharedMemory, from_figures
from memfix.laws import SpeedBudget
from memfix.meters.clock import Race
from memfix.registry import contracts


@pytest.mark.parametrize(
    ("measured", "figures"),
    [
        (Bytes(3, 2, "budget"), {"bytes": 3, "limit_bytes": 2}),
        (Bytes(3, 2, "lock"), {"bytes": 3, "locked_bytes": 2}),
        (Bytes(3, 2, "base"), {"bytes": 3, "before_bytes": 2}),
        (Bytes(0, 0, "budget"), {"bytes": 0, "limit_bytes": 0}),
        (Bytes(None, 2, "lock"), {"locked_bytes": 2}),
        (Growth(1.25), {"exponent": 1.25}),
        (SharedMemory(4096), {"shared_bytes": 4096}),
    ],
)
def test_figures_of_bytes_are_read_back_from_json(measured: Measured, figures: dict[str, float]) -> None:
    assert measured.figures() == figures
    assert from_figures(json.loads(json.dumps(figures))) == measured


@pytest.mark.parametrize("figures", [{}, {"of another version": 1.0}])
def test_figures_that_say_nothing_to_compare_are_no_measurement(figures: dict[str, float]) -> None:
    assert from_figures(figures) is None


def test_figures_of_times_and_of_a_real_gpu_keep_their_names() -> None:
    ratio = Ratio(1.5, 2.0, "base", 1.03, 60, (1.4, 1.6), 2)
    assert ratio.figures() == {
        "ratio": 1.5, "low": 1.4, "high": 1.6, "limit": 1.03, "processes": 2, "pairs": 60, "seconds": 3.0,
        "base_seconds": 2.0,
    }  # fmt: skip
    alone = Ratio(1.5, 2.0, "naive", 1.03, 60).figures()
    assert (alone["naive_seconds"], alone.keys() & {"low", "high"}) == (2.0, set())
    assert Agreement(2, 3).figures() == {"simulated_bytes": 2, "allocator_bytes": 3}


@pytest.mark.parametrize(
    ("measured", "growth"),
    [
        (Bytes(3, 2, "lock"), 1),
        (Bytes(2, 3, "base"), -1),
        (Bytes(None, 3, "lock"), -3),
        (Bytes(3, None, "lock"), 0),
        (Bytes(3, 0, "budget"), 3),
    ],
)
def test_bytes_grow_above_their_reference(measured: Bytes, growth: int) -> None:
    assert measured.growth == growth


def test_json_of_a_finding_has_figures_and_what_is_known_of_the_form() -> None:
    finding = Finding("budget", "loss", "reported", "pass", "over", measured=Bytes(3, 2, "budget"), known="breaks it")
    data = json.loads(json.dumps(finding.as_dict()))
    assert (data["figures"], data["known"]) == ({"bytes": 3, "limit_bytes": 2}, "breaks it")
    assert data.keys() == {
        "check", "op", "form", "status", "message", "case", "phase", "details", "reproduce", "figures", "source",
        "known", "subject",
    }  # fmt: skip
    assert Finding("equality", "loss", "chunked", "pass", "equal").as_dict()["figures"] == {}


@pytest.mark.parametrize(("times_naive", "status"), [(5.5, "pass"), (2.0, "fail")])
def test_a_speed_budget_prints_the_two_times_of_its_ratio(
    monkeypatch: pytest.MonkeyPatch, times_naive: float, status: str
) -> None:
    monkeypatch.setattr(speed, "race", lambda *steps, **options: Race(5.5, 0.061, options["pairs"]))
    (rope,) = contracts(["rope"])
    law = SpeedBudget("shared_table", case="small", times_naive=times_naive)
    found = speed.check_speed(rope, law, pairs=15)
    assert (found.status, found.message) == (
        status,
        f"takes 5.500x (1 process, 15 pairs) naive's time, allowed {times_naive:g}x on cpu (336 ms against 61 ms)",
    )
    assert found.figures["seconds"] / found.figures["naive_seconds"] == pytest.approx(found.figures["ratio"])


@pytest.mark.parametrize(
    ("ratios", "races", "status"),
    [([1.0], 1, "pass"), ([1.3, 1.0], 2, "pass"), ([1.3, 1.2, 1.3], 3, "fail")],
)
def test_a_form_is_too_slow_if_it_loses_every_race(
    monkeypatch: pytest.MonkeyPatch, ratios: list[float], races: int, status: str
) -> None:
    scripted = iter(ratios)
    monkeypatch.setattr(speed, "race", lambda *steps, **options: Race(next(scripted), 0.061, options["pairs"]))
    (rope,) = contracts(["rope"])
    found = speed.check_speed(rope, SpeedBudget("shared_table", case="small", times_naive=1.1))
    assert (found.status, found.figures["ratio"]) == (status, ratios[-1])
    assert len(ratios) - len([*scripted]) == races
