"""Rows of what changed, by form, case and phase: bytes before and now, or the ratio of times; and the source line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...checks.finding import Finding
from ...checks.measured import Bytes, Ratio
from ...units import format_bytes, format_change, format_seconds
from ..judge import Verdict
from .table import interval
from .text import by_subject, checks_of

ChangedRow = tuple[str, str, str, str, str, str, str, str, str]
CHANGED_COLUMNS = ("op", "form", "case", "phase", "before", "now", "change", "source line", "verdict")
_PREFERENCE = ("lock", "base", "budget")


def changed_rows(verdict: Verdict) -> list[ChangedRow]:
    """Return what failed, could not be measured, or differs from the lock or the base; what grew most first."""
    return [_row(block) for block in heaviest_first(finding for finding in verdict.findings if _is_change(finding))]


def heaviest_first(findings: Iterable[Finding]) -> list[list[Finding]]:
    """Return a block for each subject's bytes and one for each time; what failed and grew most comes first."""
    findings = list(findings)
    times = [[finding] for finding in findings if isinstance(finding.measured, Ratio)]
    others = by_subject(finding for finding in findings if not isinstance(finding.measured, Ratio))
    return sorted([*others.values(), *times], key=_weight)


def is_gain(finding: Finding) -> bool:
    """Whether fewer bytes are used than before."""
    return isinstance(finding.measured, Bytes) and finding.measured.growth < 0


def _is_change(finding: Finding) -> bool:
    if finding.status != "note":
        return finding.status in ("fail", "error")
    return finding.check == "time" or (finding.check in ("lock", "law", "base") and isinstance(finding.measured, Bytes))


def _weight(block: Sequence[Finding]) -> tuple[int, float]:
    """Sort key: failures first, then what could not be measured; within each, by bytes, then by time."""
    statuses = {finding.status for finding in block}
    first = 0 if "fail" in statuses else 1 if "error" in statuses else 2
    measured = _shown(block)
    return first, -(measured.growth if isinstance(measured, Bytes) else measured.ratio if measured else 0)


def _shown(block: Sequence[Finding]) -> Bytes | Ratio | None:
    """Return what a block's row shows: a time, or bytes compared with the lock, else the base, else a budget."""
    if isinstance(block[0].measured, Ratio):
        return block[0].measured
    sizes = [finding.measured for finding in block if isinstance(finding.measured, Bytes)]
    return min(sizes, key=lambda size: (size.reference is None, _PREFERENCE.index(size.against)), default=None)


def _row(block: Sequence[Finding]) -> ChangedRow:
    one, measured = block[0], _shown(block)
    before, now, change = _times(measured) if isinstance(measured, Ratio) else _sizes(measured)
    source = next((finding.source for finding in block if finding.source), "")
    return one.op, one.form, one.case or "", one.phase or "", before, now, change, source, _word(block)


def _times(ratio: Ratio) -> tuple[str, str, str]:
    """Return the other time, the form's, and their ratio with its interval."""
    before = f"{ratio.against} {format_seconds(ratio.other_s)}"
    return before, format_seconds(ratio.seconds), f"{ratio.ratio:.3f}x {interval(ratio)}".rstrip()


def _sizes(size: Bytes | None) -> tuple[str, str, str]:
    """Return bytes before, now, and the exact change; a broken budget shows the budget as before."""
    if size is None:
        return "", "", ""
    if size.reference is None:
        return "no entry", format_bytes(size.used or 0), ""
    if size.used is None:
        return format_bytes(size.reference), "gone", ""
    change = format_change(size.used, size.reference)
    if size.against == "budget":
        return f"budget {format_bytes(size.reference)}", format_bytes(size.used), change
    change = f"{size.growth:+,} B ({change})" if size.growth else "none"
    return format_bytes(size.reference), format_bytes(size.used), change


def _word(block: Sequence[Finding]) -> str:
    for status, word in (("fail", "FAIL"), ("error", "not measured:")):
        found = [finding for finding in block if finding.status == status]
        if found:
            return f"{word} {checks_of(found)}"
    return "; ".join(dict.fromkeys(_short(finding) for finding in block))


def _short(finding: Finding) -> str:
    """Return the verdict column of a note."""
    if finding.check == "lock":
        return "below the lock: run memfix gate --update"
    if finding.check == "base":
        return "below the base"
    if finding.check == "law":
        return "lock lowered" if is_gain(finding) else "lock raised"
    return finding.message
