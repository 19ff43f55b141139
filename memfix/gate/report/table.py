"""The tables of everything that was judged: bytes by form and case, and ratios of times."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ...checks.finding import Finding
from ...checks.measured import Bytes, Ratio
from ...checks.memory import bytes_of
from ...contract.case import is_variant
from ...laws import NAIVE, Phase
from ...units import format_bytes
from ..judge import Verdict, not_run

_PHASES: tuple[Phase, ...] = ("forward", "held", "train")
COLUMNS = ("op", "form", "case", *_PHASES, "train below naive", "verdict")
TIME_COLUMNS = ("op", "form", "case", "phase", "against", "time", "interval", "pairs", "verdict")
RIGHT = frozenset({*_PHASES, "train below naive", "before", "now", "change", "time", "interval", "pairs"})
"""The columns of numbers, which every table aligns to the right."""


@dataclass(frozen=True)
class Row:
    """One row of a table."""

    cells: tuple[str, ...]
    failed: bool


def table_rows(verdict: Verdict) -> Iterator[Row]:
    """Yield a row for each form and case: three figures, how far its train peak is below naive's, and the verdict.

    A form that was not measured, because it is not equal to naive, has one row without figures. A variant has a row if
    it fails.
    """
    not_run_here = not_run(verdict.examinations, verdict.meter)
    found: dict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in verdict.findings:
        found[finding.op, finding.form].append(finding)
    for examination in verdict.examinations:
        readings = examination.readings
        measured = dict.fromkeys((form, case) for form, case, _ in readings)
        for form, case in measured:
            sizes = [
                format_bytes(bytes_of(readings[form, case, phase], phase)) if (form, case, phase) in readings else "-"
                for phase in _PHASES
            ]
            below = ""
            if form != NAIVE and {(form, case, "train"), (NAIVE, case, "train")} <= readings.keys():
                times = readings[form, case, "train"].times_below(readings[NAIVE, case, "train"])
                below = f"{times:.1f}x" if math.isfinite(times) else "-"
            ran = (examination.op, form, case) not in not_run_here
            wanted = (case,) if is_variant(case) else (case, None)
            here = [finding for finding in found[examination.op, form] if finding.case in wanted]
            row = _row(here, examination.op, form, case, [*sizes, below], ran=ran)
            if row.failed or not is_variant(case):
                yield row
        for form in examination.forms:
            if not any(form == measured_form for measured_form, _ in measured):
                yield _row(found[examination.op, form], examination.op, form, "-", ["-", "-", "-", ""])


def _row(here: Sequence[Finding], op: str, form: str, case: str, figures: Sequence[str], *, ran: bool = True) -> Row:
    failed = list(dict.fromkeys(finding.check for finding in here if finding.status == "fail"))
    word = f"FAIL {', '.join(failed)}" if failed else _word_without_failure(here)
    if not word:
        word = "reference" if form == NAIVE else "pass"
        word += "" if ran else ", not run: does not fit"
    return Row((op, form, case, *figures, word), bool(failed))


def _word_without_failure(findings: Sequence[Finding]) -> str:
    """Return the verdict on findings none of which failed; empty for a plain pass."""
    if any(finding.status == "error" for finding in findings):
        return "not measured"
    if known := next((finding.known for finding in findings if finding.known), ""):
        return f"{known}, as known"
    in_lock = [finding.measured for finding in findings if finding.check == "lock"]
    return "below the lock" if any(isinstance(size, Bytes) and size.growth < 0 for size in in_lock) else ""


def time_rows(verdict: Verdict) -> Iterator[Row]:
    """Yield a row for every measured ratio of times but the canary's, passed or not."""
    for finding in verdict.findings:
        ratio = finding.measured
        if isinstance(ratio, Ratio) and ratio.against != "canary":
            word = {"pass": "pass", "fail": "FAIL time", "error": "not measured"}.get(finding.status, "noted")
            cells = (
                finding.op, finding.form, finding.case or "", finding.phase or "", ratio.against,
                f"{ratio.ratio:.3f}x", interval(ratio), str(ratio.pairs), word,
            )  # fmt: skip
            yield Row(cells, finding.status == "fail")


def interval(ratio: Ratio) -> str:
    """``[1.042, 1.068]``"""
    return "[{:.3f}, {:.3f}]".format(*ratio.interval) if ratio.interval else ""
