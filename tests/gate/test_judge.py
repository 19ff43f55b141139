"""The verdict: what fails, what is only said, and the exit code that follows."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from memfix.checks.examine import Examination
from memfix.checks.finding import Finding, exit_code_of
from memfix.errors import EXIT_NOT_MEASURED, EXIT_PASS, EXIT_REGRESSION
from memfix.gate.judge import Verdict, judge, judge_entry
from memfix.gate.lock import Key
from memfix.meters.base import Allocation, Reading

ROOT = Path(__file__).resolve().parents[2]
NAIVE_KEY: Key = ("loss", "naive", "small", "train")
KEY: Key = ("loss", "chunked", "small", "train")


def reading(peak: int, **changes: Any) -> Reading:
    figures: dict[str, Any] = {"base_bytes": 10, "held_bytes": 0, "leaked_bytes": 0, "allocated_bytes": peak}
    return Reading("simulated", "H200", peak, **{**figures, **changes})


def examination(*findings: Finding, readings: Any = None, equal: Sequence[str] = ("chunked",)) -> Examination:
    if readings is None:
        readings = {("naive", "small", "train"): reading(8192), ("chunked", "small", "train"): reading(2048)}
    return Examination("loss", ("naive", "chunked"), findings, readings, frozenset(equal))


def judged(*findings: Finding, lock: dict[Key, int] | None, **examined: Any) -> Verdict:
    return judge([examination(*findings, **examined)], lock=lock, meter="simulated")


PASS = Finding("equality", "loss", "chunked", "pass", "equal")
FAIL = Finding("budget", "loss", "chunked", "fail", "peak 2 KiB, budget 1 KiB", "small", "train")
ERROR = Finding("memory", "loss", "chunked", "error", "could not be measured", "small", "train")
NOTE = Finding("budget", "loss", "chunked", "note", "memory not judged")


# ---------------------------------------------------------------- against the lock
def test_bytes_as_locked_pass() -> None:
    verdict = judged(PASS, lock={NAIVE_KEY: 8192, KEY: 2048})
    assert (verdict.exit_code, verdict.word) == (EXIT_PASS, "pass")
    assert [(f.status, f.message) for f in verdict.findings if f.check == "lock"] == [
        ("pass", "8,192 bytes, as locked"),
        ("pass", "2,048 bytes, as locked"),
    ]


def test_one_byte_above_the_lock_is_a_regression_with_the_bytes_and_what_was_alive() -> None:
    alive = (Allocation(2048, "mm", "loss.py:7"),)
    verdict = judged(
        PASS,
        lock={KEY: 2047},
        readings={("chunked", "small", "train"): reading(2048, alive_at_peak=alive)},
    )
    assert (verdict.exit_code, verdict.word) == (EXIT_REGRESSION, "regression")
    (failed,) = verdict.with_status("fail")
    assert failed.text().splitlines() == [
        "loss/chunked [small, train]: 2,048 bytes (2.00 KiB), lock 2,047 (2.00 KiB): +1 (+1 B), meter simulated",
        "  alive at the peak, largest first",
        "        2.00 KiB  mm   loss.py:7",
        "  if this is meant, run memfix gate --update and commit the lock file",
    ]


def test_where_a_phase_could_not_be_measured_no_entry_of_the_case_is_stale() -> None:
    readings = {("naive", "small", "train"): reading(8192)}
    lock = {NAIVE_KEY: 8192, KEY: 2048, ("loss", "chunked", "small", "saved"): 100}
    assert judged(PASS, ERROR, lock=lock, readings=readings).exit_code == EXIT_NOT_MEASURED


def test_bytes_below_the_lock_pass_with_a_note_that_names_update() -> None:
    verdict = judged(PASS, lock={NAIVE_KEY: 8192, KEY: 3000})
    assert verdict.exit_code == EXIT_PASS
    (note,) = verdict.with_status("note")
    assert note.text() == (
        "loss/chunked [small, train]: 2.00 KiB, 952 bytes below the lock; run memfix gate --update to keep the gain"
    )


def test_a_reading_without_an_entry_fails() -> None:
    verdict = judged(PASS, lock={NAIVE_KEY: 8192})
    assert verdict.exit_code == EXIT_REGRESSION
    (failed,) = verdict.with_status("fail")
    assert failed.text() == (
        "loss/chunked [small, train]: 2.00 KiB measured, and no entry in the lock; "
        "if this is meant, run memfix gate --update and commit the lock file"
    )


def test_an_entry_that_nothing_measures_fails() -> None:
    verdict = judged(PASS, lock={NAIVE_KEY: 8192, KEY: 2048, ("loss", "chunked", "gone", "train"): 1})
    assert verdict.exit_code == EXIT_REGRESSION
    (failed,) = verdict.with_status("fail")
    assert failed.text() == (
        "loss/chunked [gone, train]: the lock has an entry that nothing measures any more; "
        "if this is meant, run memfix gate --update and commit the lock file"
    )


def test_entries_of_ops_that_were_not_examined_are_left_alone() -> None:
    verdict = judged(PASS, lock={NAIVE_KEY: 8192, KEY: 2048, ("embedding", "gather", "small", "train"): 1})
    assert verdict.exit_code == EXIT_PASS


def test_the_held_phase_is_judged_by_the_bytes_that_are_held() -> None:
    held = {("chunked", "small", "held"): reading(9999, held_bytes=100)}
    verdict = judged(PASS, lock={("loss", "chunked", "small", "held"): 99}, readings=held)
    (failed,) = verdict.with_status("fail")
    assert failed.message == "100 bytes (100 B), lock 99 (99 B): +1 (+1.0 %), meter simulated"


@pytest.mark.parametrize(("locked", "said"), [(1, ["fail"]), (2048, []), (3000, []), (None, [])])
def test_of_a_form_that_is_not_equal_the_lock_says_only_what_grew(locked: int | None, said: list[str]) -> None:
    lock = {NAIVE_KEY: 8192} | ({} if locked is None else {KEY: locked})
    verdict = judged(lock=lock, equal=())
    assert [f.status for f in verdict.findings if (f.check, f.form) == ("lock", "chunked")] == said


def test_an_entry_of_a_form_that_is_not_equal_is_not_called_stale() -> None:
    only_naive = {("naive", "small", "train"): reading(8192)}
    verdict = judged(lock={NAIVE_KEY: 8192, KEY: 2048}, readings=only_naive, equal=())
    assert [f.form for f in verdict.findings if f.check == "lock"] == ["naive"]


@pytest.mark.parametrize(
    ("locked", "end"),
    [
        (None, "if this is meant, run pytest --memfix-update and commit the lock file"),
        (2047, "if this is meant, run pytest --memfix-update and commit the lock file"),
        (2049, "run pytest --memfix-update to keep the gain"),
    ],
)
def test_the_way_to_accept_new_bytes_is_the_callers(locked: int | None, end: str) -> None:
    found = judge_entry(KEY, 2048, locked, reading(2048), accept="pytest --memfix-update")
    assert found.text().endswith(end)


def test_without_a_lock_nothing_is_said_of_it() -> None:
    verdict = judged(PASS, lock=None)
    assert verdict.findings == (PASS,)
    assert verdict.exit_code == EXIT_PASS


def test_a_reading_that_could_not_be_taken_is_not_called_stale() -> None:
    only_naive = {("naive", "small", "train"): reading(8192)}
    verdict = judged(ERROR, lock={NAIVE_KEY: 8192, KEY: 2048}, readings=only_naive)
    assert verdict.with_status("fail") == []
    assert verdict.exit_code == EXIT_NOT_MEASURED


# ---------------------------------------------------------------- exit codes
@pytest.mark.parametrize(
    ("findings", "exit_code", "word"),
    [
        ((PASS,), EXIT_PASS, "pass"),
        ((PASS, NOTE), EXIT_PASS, "pass"),
        ((PASS, FAIL), EXIT_REGRESSION, "regression"),
        ((PASS, ERROR), EXIT_NOT_MEASURED, "could not measure"),
        ((ERROR, FAIL), EXIT_REGRESSION, "regression"),
        ((FAIL, ERROR), EXIT_REGRESSION, "regression"),
    ],
    ids=["pass", "note", "fail", "error", "error then fail", "fail then error"],
)
def test_a_failure_outweighs_an_error_and_an_error_a_pass(
    findings: tuple[Finding, ...], exit_code: int, word: str
) -> None:
    verdict = judged(*findings, lock=None)
    assert (verdict.exit_code, verdict.word) == (exit_code, word)
    assert exit_code_of(findings) == exit_code


def test_the_exit_codes_are_those_that_the_command_line_promises() -> None:
    assert (EXIT_PASS, EXIT_REGRESSION, EXIT_NOT_MEASURED) == (0, 1, 2)


def test_an_op_without_a_reading_could_not_be_measured() -> None:
    verdict = judged(PASS, lock={}, readings={})
    assert verdict.exit_code == EXIT_NOT_MEASURED
    assert [f.text() for f in verdict.with_status("error")] == ["loss: nothing was measured"]


@pytest.mark.parametrize("lock", [None, {}, {KEY: 2048}])
def test_a_gate_that_examined_nothing_could_not_measure(lock: dict[Key, int] | None) -> None:
    verdict = judge([], lock=lock, meter="simulated")
    assert verdict.exit_code == EXIT_NOT_MEASURED
    assert [f.text() for f in verdict.findings] == ["gate: no op was examined: nothing was measured"]


def test_findings_from_elsewhere_count_like_our_own() -> None:
    extra = Finding("base law", "loss", "chunked", "fail", "under the laws of main: budget: over")
    verdict = judge([examination(PASS)], lock=None, meter="simulated", extra=[extra])
    assert verdict.findings == (PASS, extra)
    assert verdict.exit_code == EXIT_REGRESSION


# ---------------------------------------------------------------- imports
@pytest.mark.parametrize("module", ["memfix", "memfix.gate.judge", "memfix.pytest_plugin", "memfix.cli"])
def test_importing_it_does_not_import_torch(module: str) -> None:
    code = f"import {module}, sys; print('torch' in sys.modules)"
    child = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (child.returncode, child.stdout, child.stderr) == (0, "False\n", "")
