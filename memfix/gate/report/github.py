"""The gate's report on GitHub: an annotation for each failure, on its line, and the table in the job summary."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ...checks.finding import Finding
from ..judge import Verdict
from .changed import heaviest_first, is_gain
from .markdown import as_markdown
from .place import place_in_repository
from .text import block_lines, checks_of

SHOWN = 10
"""GitHub shows the first ten annotations of each level in a step, and silently drops the others."""


def on_github() -> bool:
    return os.environ.get("GITHUB_ACTIONS") == "true"


def announce(verdict: Verdict) -> None:
    """Write annotations to standard error, and the Markdown report to the job summary."""
    broken = [block for status in ("fail", "error") for block in heaviest_first(verdict.with_status(status))]
    notes = [finding for finding in verdict.with_status("note") if finding.check in ("law", "lock")]
    _annotate("error", broken)
    _annotate("warning", [[finding] for finding in notes if not is_gain(finding)])
    _annotate("notice", [[finding] for finding in notes if is_gain(finding)])
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if summary:
        try:
            with open(summary, "a", encoding="utf-8") as file:
                file.write(as_markdown(verdict) + "\n")
        except OSError as error:  # the verdict stands without it
            print(f"memfix: no job summary at {summary}: {error.strerror}", file=sys.stderr)


def _annotate(level: str, blocks: Sequence[Sequence[Finding]]) -> None:
    """One annotation for each block; where there are more than GitHub shows, the last says how many."""
    shown = blocks if len(blocks) <= SHOWN else blocks[: SHOWN - 1]
    for findings in shown:
        source = next((finding.source for finding in findings if finding.source), "")
        properties = [*_location(source), f"title={_property(f'memfix {checks_of(findings)}')}"]
        text = "\n".join(block_lines(findings))
        print(f"::{level} {','.join(properties)}::{_data(text)}", file=sys.stderr)
    if len(shown) < len(blocks):
        print(f"::{level} title=memfix::{len(blocks) - len(shown)} more: the job summary has them", file=sys.stderr)


def _location(source: str) -> list[str]:
    """``file=`` and ``line=`` of a line in the repository, with its path from the root; else nothing."""
    place = place_in_repository(source)
    return [f"file={_property(place[0])}", f"line={place[1]}"] if place else []


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
