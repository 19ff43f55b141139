"""What changed, one row for each form, case and phase: bytes before and now, or the ratio of times; and the line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from ...checks.finding import Finding
from ...units import format_bytes, format_change, format_seconds
from ..judge import Verdict
from . import by_subject, checks_of

ChangedRow = tuple[str, str, str, str, str, str, str, str, str]
CHANGED_COLUMNS = ("op", "form", "case", "phase", "before", "now", "change", "source line", "verdict")

TimeRow = tuple[str, str, str, str, str, str, str, str, str]
TIME_COLUMNS = ("op", "form", "case", "phase", "against", "time", "interval", "pairs", "verdict")


def changed_rows(verdict: Verdict) -> list[ChangedRow]:
    """Everything that failed, could not be measured, or is not as the lock or the base has it; what grew most first."""
    return [_row(block) for block in heaviest_first(finding for finding in verdict.findings if _is_change(finding))]


def heaviest_first(findings: Iterable[Finding]) -> list[list[Finding]]:
    """What is said of one subject's bytes is one block, each time is one; what failed and grew most comes first."""
    findings = list(findings)
    bytes_of_subjects = by_subject(finding for finding in findings if "ratio" not in finding.figures).values()
    return sorted([*bytes_of_subjects, *([f] for f in findings if "ratio" in f.figures)], key=_weight)


def time_rows(verdict: Verdict) -> Iterator[TimeRow]:
    """Every ratio of times that was taken, passed or not."""
    for f in verdict.findings:
        if f.check in ("time", "speed") and "ratio" in f.figures:
            word = {"pass": "pass", "fail": "FAIL time", "error": "not measured"}.get(f.status, "noted")
            pairs = f"{f.figures['pairs']:.0f}" if "pairs" in f.figures else ""
            ratio = f"{f.figures['ratio']:.3f}x"
            against = _against(f.figures)
            yield f.op, f.form, f.case or "", f.phase or "", against, ratio, _interval(f.figures), pairs, word


def _is_change(finding: Finding) -> bool:
    if finding.status in ("fail", "error"):
        return True
    said_of_bytes = finding.check in ("lock", "law") and "bytes" in finding.figures
    return finding.status == "note" and (said_of_bytes or finding.check == "time")


def _weight(block: Sequence[Finding]) -> tuple[int, float]:
    """Failures first, then what could not be measured; inside of each, by bytes, then by time."""
    statuses = {finding.status for finding in block}
    first = 0 if "fail" in statuses else 1 if "error" in statuses else 2
    figures = _figures(block)
    grown = figures.get("bytes", 0) - figures.get("locked_bytes", figures.get("before_bytes", figures.get("bytes", 0)))
    return first, -(grown or figures.get("ratio", 0))


def _figures(block: Sequence[Finding]) -> dict[str, float]:
    """Of all findings of one subject; the lock's stand before the base's."""
    merged: dict[str, float] = {}
    for finding in block:
        merged = {**finding.figures, **merged}
    return merged


def _row(block: Sequence[Finding]) -> ChangedRow:
    one, figures = block[0], _figures(block)
    before, now, change = _times(figures) if "ratio" in figures else _sizes(figures)
    source = next((finding.source for finding in block if finding.source), "")
    return one.op, one.form, one.case or "", one.phase or "", before, now, change, source, _word(block)


def _times(figures: Mapping[str, float]) -> tuple[str, str, str]:
    """The other's time, today's, and the ratio with its interval: the ratio is not that of the two times."""
    against = _against(figures)
    before = f"{against} {format_seconds(figures[f'{against}_seconds'])}" if against else ""
    now = format_seconds(figures["seconds"]) if "seconds" in figures else ""
    return before, now, f"{figures['ratio']:.3f}x {_interval(figures)}".rstrip()


def _against(figures: Mapping[str, float]) -> str:
    """``base`` or ``naive``: whose seconds stand beside today's."""
    return next((name.removesuffix("_seconds") for name in figures if name.endswith("_seconds")), "")


def _sizes(figures: Mapping[str, float]) -> tuple[str, str, str]:
    """Before, now, and the exact change. Where nothing was there before, the budget that is broken stands for it."""
    now = int(figures["bytes"]) if "bytes" in figures else None
    before = figures.get("locked_bytes", figures.get("before_bytes"))
    if now is None:
        return ("", "", "") if before is None else (format_bytes(int(before)), "gone", "")
    if before is not None:
        change = f"{now - int(before):+,} B ({format_change(now, int(before))})" if now != before else "none"
        return format_bytes(int(before)), format_bytes(now), change
    limit = figures.get("limit_bytes")
    if limit is not None:
        return f"budget {format_bytes(int(limit))}", format_bytes(now), format_change(now, int(limit))
    return "no entry", format_bytes(now), ""


def _interval(figures: Mapping[str, float]) -> str:
    return f"[{figures['low']:.3f}, {figures['high']:.3f}]" if {"low", "high"} <= figures.keys() else ""


def _word(block: Sequence[Finding]) -> str:
    for status, word in (("fail", "FAIL"), ("error", "not measured:")):
        found = [finding for finding in block if finding.status == status]
        if found:
            return f"{word} {checks_of(found)}"
    return "; ".join(dict.fromkeys(_in_short(finding) for finding in block))


def _in_short(finding: Finding) -> str:
    if finding.check == "lock":
        return "below the lock: run memfix gate --update"
    return finding.message.split(":")[0] if finding.check == "law" else finding.message
