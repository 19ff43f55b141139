"""SARIF: what failed, by the rules of the format and those of GitHub, on its line and with a stable fingerprint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from their_repository import Theirs

from memfix.checks.finding import Finding
from memfix.checks.plan import Kind
from memfix.gate.judge import Verdict
from memfix.gate.report import sarif as sarif_report
from memfix.gate.report.sarif import as_sarif

GROWN = Finding(
    "lock", "loss", "chunked", "fail", "3,072 bytes, lock 2,048", "big", "train", ("  +1.00 KiB: `x.float()`",),
    "memfix check loss", source="my src/loss.py:2",
)  # fmt: skip
UNMEASURED = Finding("memory", "loss", "reported", "error", "\x1b[31mRuntimeError\x1b[0m: no GPU", "small", "train")
OFF = Finding("bad input", "loss", "chunked", "fail", "not refused", source="/usr/lib/elsewhere.py:7")
PASSED = Finding("equality", "loss", "chunked", "pass", "equal")
NOTE = Finding("law", "loss", "", "note", "changed")


def sarif(*findings: Finding) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(as_sarif(Verdict((), findings, "simulated")))
    require_valid(data)
    return data["runs"][0]  # type: ignore[no-any-return]


def require_valid(data: dict[str, Any]) -> None:
    """The rules of the 2.1.0 schema for the objects in use, and GitHub's: a place and a fingerprint for each result."""
    assert data.keys() == {"$schema", "version", "runs"}
    assert data["version"] == "2.1.0"
    for run in data["runs"]:
        assert run.keys() <= {"tool", "columnKind", "invocations", "results"}
        driver = run["tool"]["driver"]
        assert driver["name"]
        ids = [rule["id"] for rule in driver["rules"]]
        assert len(ids) == len({*ids})
        assert all(rule["shortDescription"]["text"].endswith(".") for rule in driver["rules"])
        for invocation in run["invocations"]:
            assert type(invocation["executionSuccessful"]) is bool
            assert type(invocation["exitCode"]) is int
        for result in run["results"]:
            assert result["level"] in ("none", "note", "warning", "error")
            assert ids[result["ruleIndex"]] == result["ruleId"]
            assert result["message"]["text"].replace("\n", "").replace("\t", "").isprintable()
            assert all(type(value) is str for value in result["partialFingerprints"].values())
            assert result["partialFingerprints"]["primaryLocationLineHash"]
            (location,) = result["locations"]
            uri = location["physicalLocation"]["artifactLocation"]["uri"]
            assert not uri.startswith(("/", "file:", "../"))
            assert " " not in uri
            assert location["physicalLocation"]["region"]["startLine"] >= 1


@pytest.fixture(autouse=True)
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a repository, below which the gate runs."""
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "sub/my src").mkdir(parents=True)
    (tmp_path / "sub/my src/loss.py").touch()
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path


def places(run: dict[str, Any]) -> list[tuple[str, int]]:
    physical = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    return [(place["artifactLocation"]["uri"], place["region"]["startLine"]) for place in physical]


def test_what_failed_and_what_could_not_be_measured_is_a_result_each() -> None:
    run = sarif(PASSED, GROWN, UNMEASURED, OFF, NOTE)
    assert [(result["ruleId"], result["level"]) for result in run["results"]] == [
        ("memfix/lock", "error"), ("memfix/memory", "warning"), ("memfix/bad-input", "error")
    ]  # fmt: skip
    assert run["results"][0]["message"]["text"] == GROWN.text()
    assert "\x1b" not in run["results"][1]["message"]["text"]
    assert run["invocations"] == [{"executionSuccessful": False, "exitCode": 1}]


def test_a_message_cannot_hold_a_link() -> None:
    (result,) = sarif(replace(GROWN, message="[details](https://example.org)"))["results"]
    assert "](" not in result["message"]["text"]


def test_every_check_has_a_rule() -> None:
    assert {*get_args(Kind)} <= sarif_report._RULES.keys()
    (rule,) = sarif(replace(GROWN, check="new check"))["tool"]["driver"]["rules"]
    assert (rule["id"], rule["name"]) == ("memfix/new-check", "NewCheck")


def test_a_pass_has_no_results() -> None:
    run = sarif(PASSED, NOTE)
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 0}]


def test_paths_are_from_the_root_and_a_line_elsewhere_is_put_where_ops_are_registered(repository: Path) -> None:
    assert places(sarif(GROWN, UNMEASURED, OFF)) == [
        ("sub/my%20src/loss.py", 2), ("pyproject.toml", 1), ("pyproject.toml", 1)
    ]  # fmt: skip


def fingerprints(*findings: Finding) -> list[str]:
    return [result["partialFingerprints"]["memfixFinding/v1"] for result in sarif(*findings)["results"]]


def test_a_fingerprint_outlives_other_bytes_and_lines_and_tells_failures_apart() -> None:
    moved = replace(GROWN, message="4,096 bytes, lock 2,048", source="my src/loss.py:40", details=())
    others = [replace(GROWN, case="small"), replace(GROWN, form="other"), replace(GROWN, check="budget"), GROWN]
    assert fingerprints(GROWN) == fingerprints(moved)
    assert len({*fingerprints(GROWN, *others)}) == 5


def test_the_command_writes_it_with_the_line_of_the_form(theirs: Theirs) -> None:
    theirs.edit("src/theirs/scan.py", "add_(1)", "add_(2)")
    ended = theirs.gate("their_scan", "--no-lock", "--sarif", "gate.sarif", "--junit", "gate.xml")
    assert ended.returncode == 1
    data = json.loads((theirs.root / "gate.sarif").read_text())
    require_valid(data)
    assert places(data["runs"][0]) == [("src/theirs/scan.py", 4)]
    assert data["runs"][0]["results"][0]["ruleId"] == "memfix/equality"
    assert 'file="src/theirs/scan.py" line="4"' in (theirs.root / "gate.xml").read_text()


def test_only_one_report_goes_to_standard_output(theirs: Theirs) -> None:
    ended = theirs.gate("their_scan", "--sarif", "-", "--junit", "-")
    assert ended.returncode == 4
    assert "only one report can go to standard output" in ended.stderr
