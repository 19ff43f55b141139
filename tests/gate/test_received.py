"""A JSON report that somebody else sent: what memfix wrote comes back whole, and anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import test_reports as made

from memfix.checks.finding import Finding
from memfix.checks.measured import Agreement, Bytes, Growth, Measured, Ratio, SharedMemory, from_figures
from memfix.errors import UsageError
from memfix.gate.judge import Verdict
from memfix.gate.report import as_json
from memfix.gate.report.markdown import as_markdown
from memfix.gate.report.received import received_verdict
from memfix.gate.report.schema import MOST_BYTES, parsed

STALE = Finding("lock", "loss", "gone", "fail", "stale", "big", "train", measured=Bytes(None, 2048, "lock"))
NEW = Finding("lock", "loss", "chunked", "fail", "no entry", "big", "train", measured=Bytes(1024, None, "lock"))
BYTES = made.make_verdict(
    made.PASS, made.FAIL, made.ERROR, made.LAW, made.UNJUDGED, made.GROWN, made.OVER_BUDGET, made.RAISED, made.LOWERED,
    STALE, NEW,
)  # fmt: skip
TIMES = Verdict((), (made.SLOWER, made.AS_FAST), "cpu clock")


def sent(verdict: Verdict) -> Any:
    return parsed(as_json(verdict.as_dict()).encode())


@pytest.mark.parametrize("verdict", [BYTES, TIMES, made.make_verdict(made.PASS), Verdict((), (), "simulated")])
def test_what_the_gate_wrote_is_printed_as_the_gate_printed_it(verdict: Verdict) -> None:
    assert as_markdown(received_verdict(sent(verdict))) == as_markdown(verdict)


@pytest.mark.parametrize(
    "measured",
    [
        Bytes(3072, 2560, "budget"), Bytes(None, 2560, "lock"), Bytes(3072, None, "lock"), Bytes(1, 2, "base"),
        Ratio(1.05, 0.002, "base", 1.03, 150, (1.04, 1.06), 2), Ratio(0.9, 0.1, "naive", 1.2, 30), Growth(1.01),
        Ratio(1.2, 0.1, "canary", 1.1, 30), SharedMemory(65536), Agreement(10, 12),
    ],
)  # fmt: skip
def test_every_measurement_comes_back_from_its_figures(measured: Measured) -> None:
    assert from_figures(json.loads(json.dumps(measured.figures()))) == measured


def changed(path: str, value: Any) -> Any:
    """A report of memfix with one value changed, or added."""
    data = sent(BYTES)
    *parents, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    place = data
    for key in parents:
        place = place[key]
    place[last] = value
    return data


CHANGES: list[tuple[str, Any, str]] = [
    ("comment", "## merged", "it has the unknown key 'comment'; known: verdict, exit_code, meter, notes, "),
    ("findings.1.html", "<b>", "findings[1] has the unknown key 'html'; known: check, op, form, status, "),
    ("readings.0.stages", [{"name": "x"}], "readings[0].stages[0] must have the key start_bytes"),
    ("findings.1.status", "merged", "findings[1].status must be one of pass, fail, error, note, got 'merged'"),
    ("findings.1.status", ["fail"], "findings[1].status must be one of pass, fail, error, note, got ['fail']"),
    ("findings.1.op", "x" * 20_001, "findings[1].op must be text of at most 20,000 characters, got 'xxxxxxxxxxxx"),
    ("findings.1.op", 7, "findings[1].op must be text of at most 20,000 characters, got 7"),
    ("findings.1.op", None, "findings[1].op must be text of at most 20,000 characters, got None"),
    ("findings.1.case", 1.5, "findings[1].case must be text of at most 20,000 characters, got 1.5"),
    ("findings.1.details", "text", "findings[1].details must be a list of at most 10,000 entries, got 'text'"),
    ("findings.1.figures", {"bytes": "1"}, "findings[1].figures must be a number of at most 63 bits, got '1'"),
    ("findings.1.figures", {"bytes": float("nan")}, "findings[1].figures must be a number of at most 63 bits, got nan"),
    ("findings", {}, "findings must be a list of at most 10,000 entries, got {}"),
    ("findings.1", [], "findings[1] must be an object, got []"),
    ("notes", [""] * 10_001, "notes must be a list of at most 10,000 entries, got ['', '', '', '', '', '', ...]"),
    ("exit_code", True, "exit_code must be a whole number of at most 63 bits, got True"),
    ("readings.0.peak_bytes", 2**63, "readings[0].peak_bytes must be a whole number of at most 63 bits, got 92233720"),
    ("readings.0.exact", "yes", "readings[0].exact must be true or false, got 'yes'"),
    (
        "readings.0.phase",
        "now",
        "readings[0].phase must be one of forward, train, held, saved, results, kept, got 'now'",
    ),
    ("readings.0.alive_at_peak", [[]], "readings[0].alive_at_peak[0] must be an object, got []"),
    ("readings.0.timeline", {}, "readings[0].timeline must be null, got {}"),
    ("meter", "\n::error::x", ""),
]


@pytest.mark.parametrize(("path", "value", "message"), CHANGES, ids=lambda value: str(value)[:30])
def test_what_memfix_does_not_write_is_refused_in_one_sentence(path: str, value: Any, message: str) -> None:
    if not message:
        assert received_verdict(changed(path, value)).meter == value, "text may say anything: Markdown escapes it"
        return
    with pytest.raises(UsageError) as refused:
        received_verdict(changed(path, value))
    assert str(refused.value).startswith(message)
    assert len(str(refused.value)) < 300
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("verdict", "pass"), ("exit_code", 0), ("findings.1.subject", "kda"), ("readings.0.bytes", 1),
        ("readings.0.human", "nothing"), ("findings.1.figures", {"saved": 1}), ("findings.1.figures", {"bytes": 1.5}),
        ("readings.1.phase", "forward"),
    ],
)  # fmt: skip
def test_a_verdict_that_does_not_follow_from_its_findings_is_refused(path: str, value: Any) -> None:
    with pytest.raises(UsageError, match=r"^its verdict, subjects and sizes must follow from its findings"):
        received_verdict(changed(path, value))


def test_a_report_of_pytest_is_refused_with_the_command_that_writes_one() -> None:
    with pytest.raises(UsageError, match="it is pytest's report, which has no verdict; memfix gate --json writes one"):
        received_verdict({"readings": [], "notes": []})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "it must be JSON: "),
        (b"{", "it must be JSON: "),
        (b'{"x": ' + b"9" * 5000 + b"}", "it must be JSON: "),
        (b'{"meter": "\xff"}', "it must be UTF-8, and byte 11 is not"),
        (b" " * (MOST_BYTES + 1), "it must have at most 8,388,608 bytes, and has more"),
        (b"", "it must be JSON: "),
    ],
    ids=["deep", "cut", "number", "not UTF-8", "large", "empty"],
)
def test_what_is_no_json_is_refused_in_one_sentence(content: bytes, message: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(content)
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
