"""A verdict for people and machines: terminal, Markdown, JUnit, JSON, GitHub."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...checks.finding import Finding
from ...checks.memory import bytes_of
from ...errors import UsageError
from ...laws import NAIVE, PHASES
from ...units import format_bytes
from ..judge import Verdict, readings_by_key

Row = tuple[str, str, str, str, str, str, str, str]
COLUMNS = ("op", "form", "case", "forward", "held", "train", "train below naive", "verdict")


def table_rows(verdict: Verdict) -> Iterator[Row]:
    """One row for each form and case: its three figures, how far below naive it trains, and what is said of it.

    A form that was not measured, because it is not equal to naive, has one row without figures.
    """
    for examination in verdict.examinations:
        readings = examination.readings
        places = dict.fromkeys((form, case) for form, case, _ in readings)
        for form, case in places:
            shown = {
                phase: format_bytes(bytes_of(readings[form, case, phase], phase))
                if (form, case, phase) in readings
                else "-"
                for phase in PHASES
            }
            below = ""
            if form != NAIVE and {(form, case, "train"), (NAIVE, case, "train")} <= readings.keys():
                times = readings[form, case, "train"].times_below(readings[NAIVE, case, "train"])
                below = f"{times:.1f}x" if math.isfinite(times) else "-"
            yield (
                examination.op, form, case, shown["forward"], shown["held"], shown["train"], below,
                _word(verdict, examination.op, form, case),
            )  # fmt: skip
        for form in examination.forms:
            if not any(form == measured for measured, _ in places):
                yield (examination.op, form, "-", "-", "-", "-", "", _word(verdict, examination.op, form))


def _word(verdict: Verdict, op: str, form: str, case: str | None = None) -> str:
    here = [f for f in verdict.findings if (f.op, f.form) == (op, form) and (case is None or f.case in (case, None))]
    failing = list(dict.fromkeys(f.check for f in here if f.status == "fail"))
    if failing:
        return "FAIL " + ", ".join(failing)
    if any(f.status == "error" for f in here):
        return "not measured"
    if any("known broken" in f.message for f in here):
        return "breaks its budget, as known"
    if any("known unequal" in f.message for f in here):
        return "not equal, as known"
    if any("below the lock" in f.message for f in here):
        return "below the lock"
    word = "reference" if form == NAIVE else "pass"
    return f"{word}, not run: does not fit" if _was_not_run(verdict, op, form, case) else word


def _was_not_run(verdict: Verdict, op: str, form: str, case: str | None) -> bool:
    """Do the simulated meter's bytes stand for a form that the GPU cannot hold?"""
    readings = readings_by_key(verdict.examinations)
    return any(key[:3] == (op, form, case) and reading.meter != verdict.meter for key, reading in readings.items())


def summary_line(verdict: Verdict) -> str:
    """The last line: the verdict in one sentence."""
    ops, forms = _judged(verdict)
    counts = {status: len(verdict.with_status(status)) for status in ("pass", "fail", "error")}
    parts = [counted(ops, "op"), counted(forms, "form")]
    parts += [f"{counted(counts['pass'], 'check')} passed"]
    parts += [f"{counts['fail']} failed"] if counts["fail"] else []
    parts += [f"{counts['error']} could not be measured"] if counts["error"] else []
    return f"memfix gate: {verdict.word}: {', '.join(parts)}, meter {verdict.meter}"


def _judged(verdict: Verdict) -> tuple[int, int]:
    """How many ops and forms; a verdict without examinations, such as that of times, knows them by its findings."""
    if verdict.examinations:
        return len(verdict.examinations), sum(len(e.forms) - 1 for e in verdict.examinations)
    forms = {(finding.op, finding.form) for finding in verdict.findings if finding.form}
    return len({op for op, _ in forms}), len(forms)


def by_subject(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Several budgets and the lock often fail on one reading: they are one block, the lock's exact bytes first."""
    blocks: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.check != "lock"):
        blocks.setdefault(finding.subject, []).append(finding)
    return blocks


def checks_of(findings: Sequence[Finding]) -> str:
    """``lock, budget``"""
    return ", ".join(dict.fromkeys(finding.check for finding in findings))


def told_once(subject: str, findings: Sequence[Finding]) -> list[str]:
    """Every message, then every line below them, each once."""
    first, *others = dict.fromkeys(finding.message for finding in findings)
    lines = [f"{subject}: {first}", *(f"  {message}" for message in others)]
    lines += dict.fromkeys(line for finding in findings for line in finding.details)
    return lines + [f"  reproduce: {finding.reproduce}" for finding in findings if finding.reproduce]


def counted(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def write_report(target: str, text: str) -> None:
    """Write a report to a path, or to standard output for ``-``."""
    if target == "-":
        sys.stdout.write(text + "\n")
        return
    try:
        Path(target).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write the report {target}: {error.strerror or error}") from None


def require_writable(target: str | None) -> None:
    """Refuse a report path that cannot be written before minutes are spent on measuring."""
    if target is None or target == "-":
        return
    path = Path(target)
    try:
        if path.is_dir():
            raise UsageError(f"cannot write the report {target}: it is a folder")
        if not path.resolve().parent.is_dir():
            raise UsageError(f"cannot write the report {target}: no folder {path.resolve().parent}")
        was_there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not was_there:
            path.unlink(missing_ok=True)  # of several processes that ask, another may have been first
    except OSError as error:
        raise UsageError(f"cannot write the report {target}: {error.strerror or error}") from None


def as_json(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2)
