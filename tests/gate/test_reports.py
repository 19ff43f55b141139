"""One verdict in every form that people and machines read."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memfix.checks.examine import Examination
from memfix.checks.finding import Finding
from memfix.errors import EXIT_USAGE, UsageError
from memfix.gate import report
from memfix.gate.judge import Verdict, judge
from memfix.gate.report import github
from memfix.gate.report.junit import as_junit
from memfix.gate.report.markdown import as_markdown
from memfix.gate.report.terminal import print_verdict
from memfix.meters.base import Allocation, Reading

PASS = Finding("equality", "loss", "chunked", "pass", "equal in 40 calls")
FAIL = Finding(
    "budget", "loss", "chunked", "fail", "peak 2.00 KiB, budget 1.00 KiB (100%)", "big", "train",
    ("  alive at the peak", "  2.00 KiB mm"), "memfix check loss --at N=3",
)  # fmt: skip
ERROR = Finding("memory", "loss", "reported", "error", "could not be measured: <no & GPU>", "small", "train")
LAW = Finding("law", "loss", "", "note", "budget chunked [big, train] changed: 2 KiB; at main: 1 KiB")
UNJUDGED = Finding("budget", "loss", "chunked", "note", "memory not judged")


def reading(peak: int, held: int = 0) -> Reading:
    alive = (Allocation(peak, "mm", "loss.py:7"),)
    return Reading("simulated", "H200", peak, 10, held, 0, peak, alive_at_peak=alive)


def make_verdict(*findings: Finding) -> Verdict:
    readings: dict[Any, Reading] = {
        ("naive", "small", "forward"): reading(4096),
        ("naive", "small", "held"): reading(4096, held=512),
        ("naive", "small", "train"): reading(8192),
        ("naive", "big", "train"): reading(1 << 20),
        ("chunked", "small", "train"): reading(2048),
        ("chunked", "big", "train"): reading(2048),
        ("reported", "big", "train"): reading(1024),
    }
    examined = Examination("loss", ("naive", "chunked", "reported"), findings, readings, frozenset({"chunked"}))
    return judge(
        [examined], lock=None, meter="simulated", notes=["cuda meter unavailable"], surroundings={"torch": "2.13"}
    )


VERDICT = make_verdict(PASS, FAIL, ERROR, LAW, UNJUDGED)
SUMMARY = "memfix gate: regression: 1 op, 2 forms, 1 check passed, 1 failed, 1 could not be measured, meter simulated"


# ---------------------------------------------------------------- the table
def test_the_table_has_one_row_for_each_form_and_case() -> None:
    assert list(report.table_rows(VERDICT)) == [
        ("loss", "naive", "small", "4.00 KiB", "512 B", "8.00 KiB", "", "reference"),
        ("loss", "naive", "big", "-", "-", "1.00 MiB", "", "reference"),
        ("loss", "chunked", "small", "-", "-", "2.00 KiB", "4.0x", "pass"),
        ("loss", "chunked", "big", "-", "-", "2.00 KiB", "512.0x", "FAIL budget"),
        ("loss", "reported", "big", "-", "-", "1.00 KiB", "1024.0x", "pass"),
    ]


@pytest.mark.parametrize(
    ("finding", "word"),
    [
        (Finding("equality", "loss", "chunked", "fail", "not equal"), "FAIL equality"),
        (Finding("memory", "loss", "chunked", "error", "no"), "not measured"),
        (
            Finding("budget", "loss", "chunked", "pass", "peak 2 (known broken, 2.0x over)", "small"),
            "breaks its budget, as known",
        ),
        (Finding("lock", "loss", "chunked", "note", "952 bytes below the lock", "small"), "below the lock"),
        (Finding("equality", "other", "chunked", "fail", "not equal"), "pass"),
        (Finding("budget", "loss", "chunked", "fail", "over", "another case"), "pass"),
    ],
)
def test_the_last_column_says_the_worst_of_what_was_found_there(finding: Finding, word: str) -> None:
    rows = {row[1:3]: row[-1] for row in report.table_rows(make_verdict(finding))}
    assert rows["chunked", "small"] == word


def test_the_summary_counts_what_was_found() -> None:
    assert report.summary_line(VERDICT) == SUMMARY
    assert report.summary_line(make_verdict(PASS)) == (
        "memfix gate: pass: 1 op, 2 forms, 1 check passed, meter simulated"
    )


# ---------------------------------------------------------------- JSON
def test_json_holds_the_verdict_every_finding_and_every_reading() -> None:
    loaded = json.loads(report.as_json(VERDICT.as_dict()))
    assert (loaded["verdict"], loaded["exit_code"], loaded["meter"]) == ("regression", 1, "simulated")
    assert (loaded["notes"], loaded["surroundings"]) == (["cuda meter unavailable"], {"torch": "2.13"})
    assert [(f["check"], f["status"], f["subject"]) for f in loaded["findings"]] == [
        ("equality", "pass", "loss/chunked"),
        ("budget", "fail", "loss/chunked [big, train]"),
        ("memory", "error", "loss/reported [small, train]"),
        ("law", "note", "loss"),
        ("budget", "note", "loss/chunked"),
    ]
    assert len(loaded["readings"]) == 7
    held = loaded["readings"][1]
    assert {key: held[key] for key in ("op", "form", "case", "phase", "bytes", "human", "peak_bytes")} == {
        "op": "loss", "form": "naive", "case": "small", "phase": "held", "bytes": 512, "human": "512 B",
        "peak_bytes": 4096,
    }  # fmt: skip
    assert held["alive_at_peak"] == [{"bytes": 4096, "what": "mm", "place": "loss.py:7", "code": "", "count": 1}]


def test_a_reading_survives_json() -> None:
    there = reading(4096, held=512)
    assert Reading.from_dict(json.loads(json.dumps(there.as_dict()))) == there


# ---------------------------------------------------------------- Markdown
def test_markdown_has_the_summary_a_row_for_each_form_and_case_and_every_failure() -> None:
    assert as_markdown(VERDICT).splitlines() == [
        f"### {SUMMARY}",
        "",
        "> cuda meter unavailable",
        "",
        "| op | form | case | forward | held | train | train below naive | verdict |",
        "|---|---|---|---:|---:|---:|---:|---|",
        "| loss | naive | small | 4.00 KiB | 512 B | 8.00 KiB |  | reference |",
        "| loss | naive | big | - | - | 1.00 MiB |  | reference |",
        "| loss | chunked | small | - | - | 2.00 KiB | 4.0x | pass |",
        "| loss | chunked | big | - | - | 2.00 KiB | 512.0x | FAIL budget |",
        "| loss | reported | big | - | - | 1.00 KiB | 1024.0x | pass |",
        "",
        "#### Laws that this change changes",
        "",
        "- **loss** budget chunked [big, train] changed: 2 KiB; at main: 1 KiB",
        "",
        "#### Failed",
        "",
        "budget",
        "```",
        "loss/chunked [big, train]: peak 2.00 KiB, budget 1.00 KiB (100%)",
        "  alive at the peak",
        "  2.00 KiB mm",
        "  reproduce: memfix check loss --at N=3",
        "```",
        "",
        "#### Could not be measured",
        "",
        "memory",
        "```",
        "loss/reported [small, train]: could not be measured: <no & GPU>",
        "```",
    ]


# ---------------------------------------------------------------- JUnit
def test_junit_counts_failures_errors_and_notes() -> None:
    (suite,) = ElementTree.fromstring(as_junit(VERDICT))
    assert suite.attrib == {"name": "memfix gate", "tests": "5", "failures": "1", "errors": "1", "skipped": "2"}
    assert [(case.get("classname"), case.get("name"), [child.tag for child in case]) for case in suite] == [
        ("memfix.loss", "equality: loss/chunked", []),
        ("memfix.loss", "budget: loss/chunked [big, train]", ["failure"]),
        ("memfix.loss", "memory: loss/reported [small, train]", ["error"]),
        ("memfix.loss", "law: loss", ["skipped"]),
        ("memfix.loss", "budget: loss/chunked", ["skipped"]),
    ]
    assert suite[1][0].get("message") == FAIL.message
    assert suite[1][0].text == FAIL.text()
    assert suite[2][0].get("message") == "could not be measured: <no & GPU>"


def test_junit_parses_where_a_message_holds_terminal_colours() -> None:
    coloured = Finding("memory", "loss", "chunked", "error", "\x1b[31mRuntimeError\x1b[0m: out of memory")
    (suite,) = ElementTree.fromstring(as_junit(make_verdict(coloured)))
    assert "RuntimeError" in suite[0][0].attrib["message"]


# ---------------------------------------------------------------- GitHub
def test_github_annotates_failures_errors_and_changed_laws_each_on_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    github.announce(VERDICT)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "::error title=memfix budget::loss/chunked [big, train]: peak 2.00 KiB, budget 1.00 KiB (100%25)"
        "%0A  alive at the peak%0A  2.00 KiB mm%0A  reproduce: memfix check loss --at N=3",
        "::error title=memfix memory::loss/reported [small, train]: could not be measured: <no & GPU>",
        "::warning title=memfix law::loss: budget chunked [big, train] changed: 2 KiB; at main: 1 KiB",
    ]


def test_github_titles_are_escaped(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    github.announce(make_verdict(Finding("a:b,c", "loss", "chunked", "fail", "over\r\n")))
    assert capsys.readouterr().err == "::error title=memfix a%3Ab%2Cc::loss/chunked: over%0D%0A\n"


def test_the_table_is_appended_to_the_job_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    summary = tmp_path / "summary.md"
    summary.write_text("what another step said\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    github.announce(VERDICT)
    assert summary.read_text() == "what another step said\n" + as_markdown(VERDICT) + "\n"


def test_a_job_summary_that_cannot_be_written_does_not_change_the_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "missing" / "summary.md"))
    github.announce(make_verdict(PASS))
    assert "summary.md" in capsys.readouterr().err


@pytest.mark.parametrize(("value", "there"), [("true", True), ("false", False), (None, False)])
def test_github_is_known_by_its_variable(value: str | None, there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    if value is not None:
        monkeypatch.setenv("GITHUB_ACTIONS", value)
    assert github.on_github() is there


# ---------------------------------------------------------------- terminal
def test_the_terminal_shows_the_table_then_errors_then_failures_then_the_verdict() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    print_verdict(VERDICT, console)
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    assert lines[0].split() == ["op", "form", "case", "forward", "held", "train", "train", "below", "naive", "verdict"]
    assert lines[1].split() == ["loss", "naive", "small", "4.00", "KiB", "512", "B", "8.00", "KiB", "reference"]
    assert lines[4].split() == ["chunked", "big", "-", "-", "2.00", "KiB", "512.0x", "FAIL", "budget"]
    assert lines[6:] == [
        "note: cuda meter unavailable",
        "law: loss: budget chunked [big, train] changed: 2 KiB; at main: 1 KiB",
        "",
        "memory NOT MEASURED",
        "loss/reported [small, train]: could not be measured: <no & GPU>",
        "",
        "budget FAILED",
        "loss/chunked [big, train]: peak 2.00 KiB, budget 1.00 KiB (100%)",
        "  alive at the peak",
        "  2.00 KiB mm",
        "  reproduce: memfix check loss --at N=3",
        "",
        SUMMARY,
    ]


# ---------------------------------------------------------------- where reports go
def test_a_report_is_written_to_a_path_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report.write_report(str(tmp_path / "gate.md"), "text")
    report.write_report("-", "text")
    assert (tmp_path / "gate.md").read_text() == "text\n"
    assert capsys.readouterr().out == "text\n"


def test_a_report_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    target = tmp_path / "missing" / "gate.json"
    with pytest.raises(UsageError) as refused:
        report.require_writable(str(target))
    assert str(refused.value) == f"cannot write the report {target}: no folder {tmp_path / 'missing'}"
    assert refused.value.exit_code == EXIT_USAGE


def test_a_report_over_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        report.require_writable(str(tmp_path))
    assert str(refused.value) == f"cannot write the report {tmp_path}: it is a folder"


def test_a_report_that_cannot_be_opened_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(UsageError) as refused:
        report.require_writable(str(tmp_path / "gate.json"))
    assert str(refused.value) == f"cannot write the report {tmp_path / 'gate.json'}: Permission denied"


def test_a_report_whose_name_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="File name too long"):
        report.require_writable(str(tmp_path / ("x" * 300)))


def test_a_report_that_fails_to_be_written_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as refused:
        report.write_report(str(tmp_path), "text")
    assert str(refused.value) == f"cannot write the report {tmp_path}: Is a directory"


def test_asking_whether_a_report_can_be_written_keeps_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "gate.json").write_text("old")
    report.require_writable(str(tmp_path / "gate.json"))
    assert (tmp_path / "gate.json").read_text() == "old"


@pytest.mark.parametrize("target", [None, "-"])
def test_no_report_and_standard_output_need_no_file(target: str | None, tmp_path: Path) -> None:
    report.require_writable(target)
    assert list(tmp_path.iterdir()) == []
