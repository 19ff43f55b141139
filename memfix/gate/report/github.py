"""What the gate says on GitHub: an annotation for each failure, on its line, and the table in the job summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ...checks.finding import Finding
from ..judge import Verdict
from . import checks_of, told_once
from .changed import heaviest_first
from .markdown import as_markdown

SHOWN = 10
"""Of each level GitHub shows the first ten annotations of a step, and drops the others without a word."""


def on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def announce(verdict: Verdict) -> None:
    broken = [block for status in ("fail", "error") for block in heaviest_first(verdict.with_status(status))]
    notes = [finding for finding in verdict.with_status("note") if finding.check in ("law", "lock")]
    _annotate("error", broken)
    _annotate("warning", [[finding] for finding in notes if not _is_gain(finding)])
    _annotate("notice", [[finding] for finding in notes if _is_gain(finding)])
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(verdict) + "\n")
        except OSError as error:  # the verdict stands without it
            print(f"memfix: no job summary at {summary}: {error.strerror}", file=sys.stderr)


def _annotate(level: str, blocks: Sequence[Sequence[Finding]]) -> None:
    """One annotation for each subject; where there are more than are shown, the last says how many."""
    shown = blocks if len(blocks) <= SHOWN else blocks[: SHOWN - 1]
    for findings in shown:
        source = next((finding.source for finding in findings if finding.source), "")
        properties = [*_location(source), f"title={_property(f'memfix {checks_of(findings)}')}"]
        text = "\n".join(told_once(findings[0].subject, findings))
        print(f"::{level} {','.join(properties)}::{_data(text)}", file=sys.stderr)
    if len(shown) < len(blocks):
        print(f"::{level} title=memfix::{len(blocks) - len(shown)} more: the job summary has them", file=sys.stderr)


def _location(source: str) -> list[str]:
    """``file=`` and ``line=``, where the line is in the repository: GitHub knows files by their path from its root."""
    name, _, line = source.rpartition(":")
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".").resolve()
    path = Path(name).resolve()
    if not (name and line.isdigit() and path.is_file() and path.is_relative_to(root)):
        return []
    return [f"file={_property(path.relative_to(root).as_posix())}", f"line={line}"]


def _is_gain(finding: Finding) -> bool:
    before = finding.figures.get("locked_bytes", finding.figures.get("before_bytes"))
    return before is not None and finding.figures.get("bytes", before) < before


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
