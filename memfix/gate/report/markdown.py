"""The verdict as Markdown: for a file, a pull-request comment, or GitHub's job summary.

It opens with the verdict and what changed; what passed is folded away. GitHub cuts a comment at 65,536 characters, and
a comment may hold two reports: each is kept below half of that, and says how much it leaves out.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from ...checks.finding import Finding
from ..judge import Verdict
from . import COLUMNS, checks_of, summary_line, table_rows, told_once
from .changed import CHANGED_COLUMNS, TIME_COLUMNS, changed_rows, heaviest_first, time_rows

LIMIT = 30_000
_TEXT_LIMIT = 4_000
_ELSEWHERE = "the JSON report and the log have them all"
_RESERVED = 1_000  # for heads, ends of folds, and the lines that say what is left out


class Paper:
    """Markdown that does not outgrow its limit: what is written first is there, and what is left out is counted."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._lines: list[str] = []

    def write(self, *lines: str) -> None:
        self._lines += lines
        self._left -= sum(len(line) + 1 for line in lines)

    def blocks(self, blocks: Sequence[Sequence[str]], thing: str, *, share: float = 1) -> None:
        """As many of the blocks as there is room for, in this share of what is left."""
        rest = self._left * (1 - share) + _RESERVED
        for number, block in enumerate(blocks):
            if self._left - sum(len(line) + 1 for line in block) < rest:
                self.write("", f"_{len(blocks) - number} more {thing} left out here: {_ELSEWHERE}._")
                return
            self.write(*block)

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        right: Sequence[str],
        thing: str,
        share: float = 1,
    ) -> None:
        self.write("| " + " | ".join(columns) + " |")
        self.write("|" + "|".join("---:" if column in right else "---" for column in columns) + "|")
        self.blocks([["| " + " | ".join(map(_cell, row)) + " |"] for row in rows], thing, share=share)

    def text(self) -> str:
        return "\n".join(self._lines)


def as_markdown(verdict: Verdict, *, limit: int = LIMIT) -> str:
    paper = Paper(limit)
    paper.write(f"### {summary_line(verdict)}", "")
    paper.blocks([[f"> {_one_line(note)}", ""] for note in verdict.notes], "notes", share=0.2)
    _write_changes(paper, verdict)
    laws = [f for f in verdict.findings if f.check == "law" and "bytes" not in f.figures]
    if laws:
        paper.write("", "#### Laws that this change changes", "")
        paper.blocks([[f"- **{finding.subject}** {_one_line(finding.message)}"] for finding in laws], "laws", share=0.4)
    for title, status in (("Failed", "fail"), ("Could not be measured", "error")):
        found = heaviest_first(verdict.with_status(status))
        if found:
            paper.write("", f"#### {title}", "")
            paper.blocks([_folded(findings, is_open=findings is found[0]) for findings in found], "of these", share=0.7)
    _write_all(paper, verdict)
    return paper.text()


def _write_changes(paper: Paper, verdict: Verdict) -> None:
    rows = changed_rows(verdict)
    if not rows:
        paper.write("Every check passed, and there is no change to show.")
        return
    shown = [(*row[:7], f"`{row[7]}`" if row[7] else "", row[8]) for row in rows]
    paper.table(CHANGED_COLUMNS, shown, right=("before", "now", "change"), thing="changed rows", share=0.4)


def _write_all(paper: Paper, verdict: Verdict) -> None:
    """Everything that was judged, folded."""
    sizes, times = list(table_rows(verdict)), list(time_rows(verdict))
    if not sizes and not times:
        return
    paper.write("", "<details><summary>Everything that was judged</summary>", "")
    if sizes:
        right = ("forward", "held", "train", "train below naive")
        paper.table(COLUMNS, sizes, right=right, thing="rows")
        paper.write("")
    if times:
        paper.table(TIME_COLUMNS, times, right=("time", "interval", "pairs"), thing="rows")
        paper.write("")
    paper.write("</details>")


def _folded(findings: Sequence[Finding], *, is_open: bool) -> list[str]:
    """A block that a click unfolds, its text as it is on a terminal."""
    subject = findings[0].subject
    text = "\n".join(told_once(subject, findings))
    if len(text) > _TEXT_LIMIT:
        text = f"{text[:_TEXT_LIMIT]}\n... {len(text) - _TEXT_LIMIT:,} more characters left out here: {_ELSEWHERE}"
    fence = "```"
    while fence in text:
        fence += "`"
    summary = (
        f"<details{' open' if is_open else ''}><summary>{html.escape(f'{checks_of(findings)}: {subject}')}</summary>"
    )
    return [summary, "", f"{fence}text", *text.splitlines(), fence, "", "</details>", ""]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:1000]


def _cell(text: str) -> str:
    return _one_line(text).replace("|", "\\|")
