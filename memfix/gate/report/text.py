"""Sentences that every report prints: the summary line, and several findings about one subject as one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...checks.finding import Finding
from ..judge import Verdict
from . import counted


def summary_line(verdict: Verdict) -> str:
    """Return the last line: the verdict in one sentence."""
    if not verdict.examinations and not verdict.findings:
        return f"memfix gate: {verdict.word}: nothing to judge"
    ops, forms = _judged(verdict)
    counts = {status: len(verdict.with_status(status)) for status in ("pass", "fail", "error")}
    parts = [counted(ops, "op"), counted(forms, "form"), f"{counted(counts['pass'], 'check')} passed"]
    parts += [f"{counts['fail']} failed"] if counts["fail"] else []
    parts += [f"{counts['error']} could not be measured"] if counts["error"] else []
    return f"memfix gate: {verdict.word}: {', '.join(parts)}, meter {verdict.meter}"


def _judged(verdict: Verdict) -> tuple[int, int]:
    """Return the numbers of ops and forms. The time gate has no examinations, so its findings are counted."""
    if verdict.examinations:
        return len(verdict.examinations), sum(len(e.forms) - 1 for e in verdict.examinations)
    forms = {(finding.op, finding.form) for finding in verdict.findings if finding.form}
    return len({op for op, _ in forms}), len(forms)


def by_subject(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Group findings by subject, the lock's first: budgets and the lock often fail on the same reading."""
    blocks: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.check != "lock"):
        blocks.setdefault(finding.subject, []).append(finding)
    return blocks


def checks_of(findings: Sequence[Finding]) -> str:
    """``lock, budget``"""
    return ", ".join(dict.fromkeys(finding.check for finding in findings))


def block_lines(findings: Sequence[Finding]) -> list[str]:
    """Return the messages of one subject's findings, then their details, without repeating a line."""
    first, *others = dict.fromkeys(finding.message for finding in findings)
    lines = [f"{findings[0].subject}: {first}", *(f"  {message}" for message in others)]
    lines += dict.fromkeys(line for finding in findings for line in finding.details)
    return lines + [f"  reproduce: {finding.reproduce}" for finding in findings if finding.reproduce]


def printable(text: str) -> str:
    """Return ``text`` without characters that XML and code hosts cannot show, such as terminal colour codes."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")
