"""The time gate's course, with processes that say what a test tells them to: retries, canaries, and what is new."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from memfix.checks.finding import Finding
from memfix.errors import EXIT_NOT_MEASURED, EXIT_PASS, EXIT_REGRESSION, MeterUnavailable, UsageError
from memfix.gate.timing.rule import MOST_PROCESSES
from memfix.gate.timing.run import run_time_gate
from memfix.gate.timing.timing_plan import Comparison, TimedForm
from memfix.gate.timing.worker import TimingResult
from memfix.gate.timing.worker_pool import WorkerPool
from memfix.meters.clock import Race
from memfix.registry import contracts

TIMED = TimedForm("shared_table", "small", "train")
WITH_BUDGET = TimedForm("shared_table", "small", "train", 1.0)
SEEN = [1.1]
SAME = [1.0, 1.001]
SLOWER = [1.06, 1.05]

Answers = dict[str, list[float | str]]
"""By what a form is timed against: the ratio that each process reads, or a trouble."""


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Answers:
    answers: Answers = {"canary": [*SEEN]}

    def time(self: Any, comparisons: Sequence[Comparison], *, base_first: bool) -> list[TimingResult]:
        return [answered(one, answers[one.against].pop(0)) for one in comparisons]

    def answered(comparison: Comparison, word: float | str) -> TimingResult:
        if isinstance(word, str):
            return TimingResult(comparison, None, word, is_new="new" in word)
        return TimingResult(comparison, Race(word, 1e-3, 30))

    monkeypatch.setattr(WorkerPool, "time", time)
    return answers


def gate(timed: TimedForm = TIMED, processes: int = 1) -> tuple[int, dict[str, Finding]]:
    verdict = run_time_gate(
        contracts(["rope"]), device="cpu", base_ref="HEAD", timed_forms={"rope": [timed]}, processes=processes
    )
    return verdict.exit_code, {finding.check: finding for finding in verdict.findings}


def test_identical_code_passes(processes: Answers) -> None:
    processes["base"] = [*SAME]
    code, found = gate()
    assert code == EXIT_PASS
    assert found["time"].message.startswith("takes 1.000x (0.989 to 1.012; 2 processes, 60 pairs) its own time at HEAD")
    assert found["time"].figures["ratio"] == 1.0005
    assert found["canary"].status == "pass"


def test_a_slower_form_fails_when_a_second_opinion_says_so_too(processes: Answers) -> None:
    processes["base"] = [*SLOWER, *SLOWER]
    code, found = gate()
    assert (code, found["time"].status) == (EXIT_REGRESSION, "fail")
    assert found["time"].details == ("  before that: 1.055x (1.042 to 1.068; 2 processes, 60 pairs)",)
    assert found["time"].reproduce == "memfix gate rope --time --base HEAD --device cpu"


def test_one_bad_minute_is_no_failure(processes: Answers) -> None:
    processes["base"] = [*SLOWER, *SAME]
    code, found = gate()
    assert code == EXIT_PASS
    assert found["time"].message.endswith("; measured again, it was within")


def test_processes_that_disagree_are_joined_by_more(processes: Answers) -> None:
    processes["base"] = [1.0, 1.2, 1.01, 1.0, 1.3, 1.0, 1.0, 0.99]
    code, found = gate()
    assert code == EXIT_PASS
    assert found["time"].figures["processes"] == MOST_PROCESSES == 8


def test_what_is_decided_is_not_asked_again(processes: Answers) -> None:
    processes["base"], processes["naive"] = [1.0, 1.03, 1.0, 1.0], [0.8]
    code, found = gate(WITH_BUDGET)
    assert code == EXIT_PASS
    assert (found["time"].figures["processes"], found["speed"].figures["processes"]) == (4, 1)
    assert not any(processes.values())


def test_so_many_as_the_user_wants_are_asked_at_least(processes: Answers) -> None:
    processes["base"], processes["canary"] = [1.0] * 6, [1.1] * 6
    _, found = gate(processes=5)
    assert found["time"].figures["processes"] == 6  # as many in one order as in the other


def test_a_canary_that_is_not_seen_is_no_measurement(processes: Answers) -> None:
    processes["base"] = [*SAME]
    processes["canary"] = [*SAME, *SAME]
    code, found = gate()
    assert (code, found["canary"].status) == (EXIT_NOT_MEASURED, "error")
    assert "no time of this machine can be believed now" in found["canary"].message


def test_a_form_that_the_base_has_not_is_shown_and_not_judged(processes: Answers) -> None:
    processes["base"] = ["the form is new"]
    code, found = gate()
    assert (found["time"].status, found["time"].message) == ("note", "no time at HEAD: the form is new")
    assert code == EXIT_PASS


def test_a_form_that_raises_could_not_be_measured(processes: Answers) -> None:
    processes["base"] = ["ValueError: no"]
    code, found = gate()
    assert (code, found["time"].message) == (EXIT_NOT_MEASURED, "not timed against base: ValueError: no")


def test_a_budget_beside_naive_is_a_row_of_its_own(processes: Answers) -> None:
    processes["base"], processes["naive"] = [*SAME], [1.06, *SLOWER]
    code, found = gate(WITH_BUDGET)
    assert (code, found["time"].status, found["speed"].status) == (EXIT_REGRESSION, "pass", "fail")
    assert "naive's time, allowed 1x on cpu" in found["speed"].message


def test_what_a_report_shipped_is_held_against_naive_alone(processes: Answers) -> None:
    processes["naive"] = [0.9, 0.901]
    timed = TimedForm("reported", "small", "train", 1.1)
    verdict = run_time_gate(contracts(["kda"]), device="cpu", base_ref="HEAD", timed_forms={"kda": [timed]})
    assert [(found.check, found.status) for found in verdict.findings] == [("canary", "pass"), ("speed", "pass")]


# ---------------------------------------------------------------- cases that are too large
LARGE = TimedForm("shared_table", "incident", "train")
SLOW = "it took longer than 10 s"


@pytest.fixture
def too_large(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], int | None]:
    """Cases as they stand take too long; by forms, how often one has to be halved, or None where nothing helps."""
    fitting: dict[tuple[str, ...], int | None] = {}

    def time(self: Any, comparisons: Sequence[Comparison], *, base_first: bool) -> list[TimingResult]:
        ratios = {"canary": 1.1, "base": 1.0, "naive": 1.0}
        return [
            TimingResult(one, Race(ratios[one.against], 1e-3, 30))
            if one.timed.halvings
            else TimingResult(one, None, SLOW, is_too_large=True)
            for one in comparisons
        ]

    def largest_within(
        self: Any, step_s: float, sizes: Sequence[TimedForm], forms: Sequence[str]
    ) -> tuple[TimedForm, float] | None:
        assert step_s == 0.5
        halvings = fitting.pop(tuple(forms))  # asked once
        return next(((size, 0.25) for size in sizes if size.halvings == halvings), None)

    monkeypatch.setattr(WorkerPool, "time", time)
    monkeypatch.setattr(WorkerPool, "largest_within", largest_within)
    return fitting


def test_a_case_that_is_too_large_is_timed_at_a_smaller_size_and_the_gate_says_so(
    too_large: dict[tuple[str, ...], int | None],
) -> None:
    too_large["shared_table",] = 4
    verdict = run_time_gate(contracts(["rope"]), device="cpu", base_ref="HEAD", timed_forms={"rope": [LARGE]})
    assert verdict.exit_code == EXIT_PASS
    found = {finding.check: finding for finding in verdict.findings}
    assert found["canary"].status == "pass"
    assert found["time"].message.endswith("(1 ms against 1 ms), at T=8192 in place of incident")
    assert (
        "rope/shared_table [incident, train] on cpu: it took longer than 10 s; timed at T=8192 instead (250 ms a "
        "step): declare a case of that size, or give --limit"
    ) in verdict.notes


def test_where_no_size_fits_it_is_refused_with_what_to_declare(too_large: dict[tuple[str, ...], int | None]) -> None:
    too_large["shared_table",] = None
    verdict = run_time_gate(contracts(["rope"]), device="cpu", base_ref="HEAD", timed_forms={"rope": [LARGE]})
    assert verdict.exit_code == EXIT_NOT_MEASURED
    assert [finding.message for finding in verdict.findings if "against base" in finding.message] == [
        "not timed against base: it took longer than 10 s; neither fits the smallest size that was tried, T=20, H=3, "
        "D=10, positions_per_chunk=24; declare a case of which a step takes at most 500 ms, or give --limit"
    ]


def test_a_budget_is_not_judged_at_another_size_than_its_own(too_large: dict[tuple[str, ...], int | None]) -> None:
    too_large["shared_table",] = 4
    too_large["shared_table", "naive"] = 6
    timed = TimedForm("shared_table", "incident", "train", 1.0)
    verdict = run_time_gate(contracts(["rope"]), device="cpu", timed_forms={"rope": [timed]})
    assert verdict.exit_code == EXIT_NOT_MEASURED
    (refused,) = (finding for finding in verdict.findings if finding.status == "error")
    assert refused.message == (
        "not timed against naive: it took longer than 10 s; declare the SpeedBudget at a case of which a step of both "
        "takes at most 500 ms, such as T=2048 (250 ms a step), or with device='cuda', or give --limit"
    )


def test_a_gate_that_timed_nothing_says_so() -> None:
    verdict = run_time_gate(contracts(["rope"]), device="cpu", timed_forms={"rope": []})
    assert verdict.exit_code == EXIT_NOT_MEASURED
    assert verdict.findings[-1].message == "nothing was timed on cpu"


def test_a_base_that_does_not_exist_and_a_gpu_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="--base: no commit 'no-such-commit'"):
        run_time_gate(contracts(["rope"]), device="cpu", base_ref="no-such-commit")
    import torch

    if not torch.cuda.is_available():
        with pytest.raises(MeterUnavailable, match="no time on cuda: torch sees no GPU; take --device cpu"):
            run_time_gate(contracts(["rope"]), device="cuda")
