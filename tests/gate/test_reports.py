"""One verdict in every form that people and machines read."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console

from memfix.checks.examine import Examination
from memfix.checks.finding import Finding
from memfix.checks.measured import Bytes, Ratio
from memfix.errors import EXIT_USAGE, UsageError
from memfix.gate import report
from memfix.gate.judge import Verdict, judge, judge_entry
from memfix.gate.report import github
from memfix.gate.report.changed import changed_rows
from memfix.gate.report.junit import as_junit
from memfix.gate.report.markdown import LIMIT, as_markdown
from memfix.gate.report.table import table_rows
from memfix.gate.report.terminal import print_verdict
from memfix.gate.report.text import summary_line
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
    assert [row.cells for row in table_rows(VERDICT)] == [
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
            Finding("budget", "loss", "chunked", "pass", "peak 2", "small", known="breaks its budget"),
            "breaks its budget, as known",
        ),
        (
            Finding("lock", "loss", "chunked", "note", "", "small", measured=Bytes(1096, 2048, "lock")),
            "below the lock",
        ),
        (Finding("equality", "other", "chunked", "fail", "not equal"), "pass"),
        (Finding("budget", "loss", "chunked", "fail", "over", "another case"), "pass"),
    ],
)
def test_the_last_column_says_the_worst_of_what_was_found_there(finding: Finding, word: str) -> None:
    rows = {row.cells[1:3]: row.cells[-1] for row in table_rows(make_verdict(finding))}
    assert rows["chunked", "small"] == word


def test_the_summary_counts_what_was_found() -> None:
    assert summary_line(VERDICT) == SUMMARY
    assert summary_line(make_verdict(PASS)) == ("memfix gate: pass: 1 op, 2 forms, 1 check passed, meter simulated")


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


# ---------------------------------------------------------------- what changed
GROWN = Finding(
    "lock", "loss", "chunked", "fail", "3,072 bytes, lock 2,048", "big", "train",
    ("  +1.00 KiB: `x.float()` loss.py:41",),
    measured=Bytes(3072, 2048, "lock"), source="loss.py:41",
)  # fmt: skip
OVER_BUDGET = Finding(
    "budget", "loss", "chunked", "fail", "peak 3.00 KiB, budget 2.50 KiB", "big", "train",
    measured=Bytes(3072, 2560, "budget"),
)  # fmt: skip
SLOWER = Finding(
    "time", "loss", "chunked", "fail", "5.2 % slower than main", "small", "train",
    measured=Ratio(1.0521, 0.002, "base", 1.03, 150, (1.048, 1.0612), 2),
)  # fmt: skip
AS_FAST = Finding(
    "time", "loss", "reported", "pass", "as fast as main", "small", "train",
    measured=Ratio(0.9987, 0.001, "naive", 1.2, 150, (0.99, 1.004), 2),
)  # fmt: skip
RAISED = Finding(
    "law", "loss", "chunked", "note", "lock raised: 2.00 KiB; at main: 1.00 KiB", "small", "train",
    measured=Bytes(2048, 1024, "base"),
)  # fmt: skip
LOWERED = Finding(
    "law", "loss", "reported", "note", "lock lowered: 1.00 KiB; at main: 2.00 KiB", "small", "train",
    measured=Bytes(1024, 2048, "base"),
)  # fmt: skip


def changed(*findings: Finding) -> list[tuple[str, ...]]:
    return [row[1:] for row in changed_rows(make_verdict(*findings))]


def test_lock_and_budgets_of_one_reading_are_one_row_with_bytes_and_line() -> None:
    assert changed(PASS, OVER_BUDGET, GROWN) == [
        ("chunked", "big", "train", "2.00 KiB", "3.00 KiB", "+1,024 B (+50.0 %)", "loss.py:41", "FAIL lock, budget")
    ]


def test_a_broken_budget_alone_stands_against_its_limit_and_points_at_the_largest_row_of_its_peak() -> None:
    broken = replace(OVER_BUDGET, measured=Bytes(2048, 1024, "budget"))
    assert changed(broken) == [
        ("chunked", "big", "train", "budget 1.00 KiB", "2.00 KiB", "2.0x over", "loss.py:7", "FAIL budget")
    ]


def test_a_budget_that_breaks_at_a_drawn_shape_points_at_the_line_that_the_lock_saw_grow() -> None:
    drawn = replace(OVER_BUDGET, case="drawn")
    assert [row[6] for row in changed(drawn, GROWN)] == ["loss.py:41", "loss.py:41"]
    assert [row[6] for row in changed(drawn)] == [""]


def test_bytes_above_the_lock_point_at_the_row_that_grew_and_not_at_the_largest() -> None:
    key = ("loss", "chunked", "big", "train")
    large, small = (
        Allocation(9000, "mm", "loss.py:7 in dense", "x @ w"),
        Allocation(10, "exp", "loss.py:8 in dense", "x.exp()"),
    )
    grown = replace(small, bytes=500)
    now = replace(reading(9500), alive_at_peak=(large, grown))
    assert judge_entry(key, 9500, 9010, now, (large, small)).source == "loss.py:8"
    assert judge_entry(key, 9500, 9010, now).source == "loss.py:7", "nothing is known of the locked peak"
    assert judge_entry(key, 9500, 9500, now, (large, small)).source == ""


def test_a_failure_without_bytes_names_no_line() -> None:
    assert changed(Finding("equality", "loss", "chunked", "fail", "not equal")) == [
        ("chunked", "", "", "", "", "", "", "FAIL equality")
    ]


def test_a_slower_form_is_a_row_with_its_ratio_and_interval_and_one_as_fast_is_none() -> None:
    slower = ("chunked", "small", "train", "base 2 ms", "2.1 ms", "1.052x [1.048, 1.061]", "", "FAIL time")
    assert changed(SLOWER, AS_FAST) == [slower]
    grown = replace(GROWN, case="small")
    assert [row[-1] for row in changed(SLOWER, grown)] == ["FAIL lock", "FAIL time"], "bytes and times are rows apart"


def test_entries_of_the_lock_that_differ_from_the_base_are_rows() -> None:
    assert changed(RAISED, LOWERED, PASS) == [
        ("chunked", "small", "train", "1.00 KiB", "2.00 KiB", "+1,024 B (2.0x over)", "", "lock raised"),
        ("reported", "small", "train", "2.00 KiB", "1.00 KiB", "-1,024 B (-50.0 %)", "", "lock lowered"),
    ]


def test_an_entry_that_nothing_measures_and_a_reading_without_one_are_rows() -> None:
    gone = Finding("lock", "loss", "old", "fail", "stale", "big", "train", measured=Bytes(None, 2048, "lock"))
    new = Finding("lock", "loss", "new", "fail", "no entry", "big", "train", measured=Bytes(1024, None, "lock"))
    assert changed(gone, new) == [
        ("new", "big", "train", "no entry", "1.00 KiB", "", "", "FAIL lock"),
        ("old", "big", "train", "2.00 KiB", "gone", "", "", "FAIL lock"),
    ]


def test_failures_come_first_and_what_grew_most_before_the_others() -> None:
    more = replace(GROWN, case="huge", measured=Bytes(9 << 20, 1 << 20, "lock"))
    rows = changed(RAISED, ERROR, GROWN, more)
    assert [(row[1], row[-1]) for row in rows] == [
        ("huge", "FAIL lock"),
        ("big", "FAIL lock"),
        ("small", "not measured: memory"),
        ("small", "lock raised"),
    ]


# ---------------------------------------------------------------- Markdown
def test_markdown_opens_with_the_verdict_and_what_changed_and_folds_the_rest() -> None:
    assert as_markdown(VERDICT).splitlines() == [
        f"### {SUMMARY}",
        "",
        "> cuda meter unavailable",
        "",
        "| op | form | case | phase | before | now | change | source line | verdict |",
        "|---|---|---|---|---:|---:|---:|---|---|",
        "| loss | chunked | big | train |  |  |  |  | FAIL budget |",
        "| loss | reported | small | train |  |  |  |  | not measured: memory |",
        "",
        "#### Laws that this change changes",
        "",
        "- **loss** budget chunked [big, train] changed: 2 KiB; at main: 1 KiB",
        "",
        "#### Failed",
        "",
        "<details open><summary>budget: loss/chunked [big, train]</summary>",
        "",
        "```text",
        "loss/chunked [big, train]: peak 2.00 KiB, budget 1.00 KiB (100%)",
        "  alive at the peak",
        "  2.00 KiB mm",
        "  reproduce: memfix check loss --at N=3",
        "```",
        "",
        "</details>",
        "",
        "",
        "#### Could not be measured",
        "",
        "<details open><summary>memory: loss/reported [small, train]</summary>",
        "",
        "```text",
        "loss/reported [small, train]: could not be measured: <no & GPU>",
        "```",
        "",
        "</details>",
        "",
        "",
        "<details><summary>Everything that was judged</summary>",
        "",
        "| op | form | case | forward | held | train | train below naive | verdict |",
        "|---|---|---|---:|---:|---:|---:|---|",
        "| loss | naive | small | 4.00 KiB | 512 B | 8.00 KiB |  | reference |",
        "| loss | naive | big | - | - | 1.00 MiB |  | reference |",
        "| loss | chunked | small | - | - | 2.00 KiB | 4.0x | pass |",
        "| loss | chunked | big | - | - | 2.00 KiB | 512.0x | FAIL budget |",
        "| loss | reported | big | - | - | 1.00 KiB | 1024.0x | pass |",
        "",
        "</details>",
    ]


def test_markdown_shows_the_line_as_code_and_every_ratio_of_times_in_the_fold() -> None:
    text = as_markdown(make_verdict(GROWN, SLOWER, AS_FAST))
    assert "| 2.00 KiB | 3.00 KiB | +1,024 B (+50.0 %) | `loss.py:41` | FAIL lock |" in text
    fold = text[text.index("Everything that was judged") :]
    assert "| loss | chunked | small | train | base | 1.052x | [1.048, 1.061] | 150 | FAIL time |" in fold
    assert "| loss | reported | small | train | naive | 0.999x | [0.990, 1.004] | 150 | pass |" in fold


def test_markdown_of_a_pass_says_that_there_is_no_change() -> None:
    assert "Every check passed, and there is no change to show." in as_markdown(make_verdict(PASS)).splitlines()


def test_markdown_of_times_alone_counts_their_forms() -> None:
    text = as_markdown(Verdict((), (SLOWER, AS_FAST), "cpu clock"))
    assert text.splitlines()[0] == (
        "### memfix gate: regression: 1 op, 2 forms, 1 check passed, 1 failed, meter cpu clock"
    )
    assert "forward | held" not in text


def test_markdown_stays_within_a_comment_and_counts_what_it_leaves_out() -> None:
    many = [replace(GROWN, case=f"case {number}", message="x" * 3000) for number in range(400)]
    text = as_markdown(make_verdict(*many))
    assert len(text) <= LIMIT
    rows, blocks = text.count("| FAIL lock |"), text.count("<details") - 1
    assert rows > 50
    assert blocks > 1
    assert f"_{400 - rows} more changed rows left out here: the JSON report and the log have them all._" in text
    assert f"_{400 - blocks} more of these left out here:" in text
    assert text.count("</details>") == blocks + 1


def test_a_long_failure_is_cut_and_says_by_how_much() -> None:
    text = as_markdown(make_verdict(replace(GROWN, details=("y" * 10_000,))))
    assert "more characters left out here: the JSON report and the log have them all" in text
    assert len(text) < 10_000


def test_what_a_form_says_cannot_leave_its_cell_or_its_fence() -> None:
    hostile = Finding("memory", "loss", "a|b\n| c", "error", "```\n# not a heading</details>", "small", "train")
    lines = as_markdown(make_verdict(hostile)).splitlines()
    assert "| loss | `a`&#124;`b `&#124;` c` | small | train |  |  |  |  | not measured: memory |" in lines
    assert lines.count("````text") == lines.count("````") == 1


# ---------------------------------------------------------------- JUnit
def test_junit_counts_failures_errors_and_notes() -> None:
    (suite,) = ElementTree.fromstring(as_junit(VERDICT))
    assert suite.attrib == {"name": "memfix gate", "tests": "5", "failures": "1", "errors": "1", "skipped": "2"}
    assert [(case.get("classname"), case.get("name"), [child.tag for child in case]) for case in suite] == [
        ("memfix.loss", "loss/chunked/equality", []),
        ("memfix.loss", "loss/chunked/budget [big, train]", ["failure"]),
        ("memfix.loss", "loss/reported/memory [small, train]", ["error"]),
        ("memfix.loss", "loss/law", ["skipped"]),
        ("memfix.loss", "loss/chunked/budget", ["skipped"]),
    ]
    assert suite[1][0].get("message") == FAIL.message
    assert suite[1][0].text == FAIL.text()
    assert suite[2][0].get("message") == "could not be measured: <no & GPU>"


def test_junit_names_the_file_and_the_line() -> None:
    (suite,) = ElementTree.fromstring(as_junit(make_verdict(PASS, GROWN)))
    assert [(case.get("file"), case.get("line")) for case in suite] == [(None, None), ("loss.py", "41")]
    assert (suite[1][0].text or "").endswith("\n  at loss.py:41")


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


@pytest.fixture
def annotations(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., list[str]]:
    """What GitHub is told, in a repository whose folder ``sub`` is worked in."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/loss.py").touch()
    monkeypatch.chdir(tmp_path / "sub")

    def annotations(*findings: Finding) -> list[str]:
        github.announce(make_verdict(*findings))
        return capsys.readouterr().err.splitlines()

    return annotations


def test_a_failure_is_annotated_once_on_its_line(annotations: Callable[..., list[str]]) -> None:
    assert annotations(OVER_BUDGET, GROWN) == [
        "::error file=sub/loss.py,line=41,title=memfix lock%2C budget::"
        "loss/chunked [big, train]: 3,072 bytes, lock 2,048"
        "%0A  peak 3.00 KiB, budget 2.50 KiB%0A  +1.00 KiB: `x.float()` loss.py:41"
    ]


@pytest.mark.parametrize("source", ["", "gone.py:41", "/usr/lib/loss.py:41", "../../loss.py:41", "loss.py"])
def test_a_line_outside_of_the_repository_is_not_pointed_at(source: str, annotations: Callable[..., list[str]]) -> None:
    (line,) = annotations(replace(GROWN, source=source))
    assert line.startswith("::error title=memfix lock::")


def test_no_more_annotations_than_are_shown_and_the_last_counts_the_others(
    annotations: Callable[..., list[str]],
) -> None:
    many = [replace(GROWN, case=f"case {number}") for number in range(github.SHOWN + 1)]
    assert len(annotations(*many[:-1])) == github.SHOWN
    lines = annotations(*many)
    assert len(lines) == github.SHOWN
    assert lines[-1] == "::error title=memfix::2 more: the job summary has them"


def test_a_raised_lock_is_a_warning_and_a_lowered_one_a_notice(annotations: Callable[..., list[str]]) -> None:
    assert [line.split(" ")[0] for line in annotations(RAISED, LOWERED)] == ["::warning", "::notice"]


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
    console = Console(width=120, file=(printed := io.StringIO()))
    print_verdict(VERDICT, console)
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
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


def test_the_terminal_shows_ratios_of_times_and_no_empty_table_of_bytes() -> None:
    console = Console(width=120, file=(printed := io.StringIO()))
    print_verdict(Verdict((), (SLOWER, AS_FAST), "cpu clock"), console)
    lines = [line.split() for line in printed.getvalue().splitlines()]
    assert lines[:3] == [
        ["op", "form", "case", "phase", "against", "time", "interval", "pairs", "verdict"],
        ["loss", "chunked", "small", "train", "base", "1.052x", "[1.048,", "1.061]", "150", "FAIL", "time"],
        ["reported", "small", "train", "naive", "0.999x", "[0.990,", "1.004]", "150", "pass"],
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


def test_a_row_of_host_memory_ran_whichever_meter_was_asked_for() -> None:
    made = make_verdict(PASS)
    (examined,) = made.examinations
    host = {place: replace(one, meter="host") for place, one in examined.readings.items()}
    words = [row.cells[-1] for row in table_rows(replace(made, examinations=(replace(examined, readings=host),)))]
    assert not any("not run" in word for word in words)
    on_a_gpu = replace(made, meter="cuda")
    assert all("not run" in row.cells[-1] for row in table_rows(on_a_gpu) if row.cells[1] == "naive")
