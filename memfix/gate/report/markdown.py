"""The verdict as Markdown: for a file, a pull-request comment, or GitHub's job summary.

It opens with the verdict and what changed; what passed is folded. GitHub refuses a comment above 65,536 characters, and
a comment may hold two reports, so each stays below half of that and says how much it leaves out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...checks.finding import Finding
from ..judge import Verdict
from .changed import CHANGED_COLUMNS, changed_rows, heaviest_first
from .escape import code, escaped, escaped_html, fenced
from .table import COLUMNS, RIGHT, TIME_COLUMNS, Row, table_rows, time_rows
from .text import block_lines, checks_of, summary_line

LIMIT = 30_000
_TEXT_LIMIT = 4_000
_ELSEWHERE = "the JSON report and the log have them all"
_RESERVED = 1_000  # for headings, ends of folds, and the lines that say what is left out


class Paper:
    """Markdown within a limit of characters: it keeps what is written first, and counts what it leaves out."""

    def __init__(self, limit: int) -> None:
        self._left = limit
        self._lines: list[str] = []

    def write(self, *lines: str) -> None:
        self._lines += lines
        self._left -= sum(len(line) + 1 for line in lines)

    def blocks(self, blocks: Sequence[Sequence[str]], thing: str, *, share: float = 1) -> None:
        """Write as many blocks as fit into this share of the remaining characters."""
        rest = self._left * (1 - share) + _RESERVED
        for number, block in enumerate(blocks):
            if self._left - sum(len(line) + 1 for line in block) < rest:
                self.write("", f"_{len(blocks) - number} more {thing} left out here: {_ELSEWHERE}._")
                return
            self.write(*block)

    def table(self, columns: Sequence[str], rows: Iterable[Iterable[str]], *, thing: str, share: float = 1) -> None:
        self.write("| " + " | ".join(columns) + " |")
        self.write("|" + "|".join("---:" if column in RIGHT else "---" for column in columns) + "|")
        self.blocks([["| " + " | ".join(row) + " |"] for row in rows], thing, share=share)

    def text(self) -> str:
        return "\n".join(self._lines)


def as_markdown(verdict: Verdict, *, limit: int = LIMIT) -> str:
    paper = Paper(limit)
    paper.write(f"### {escaped(summary_line(verdict))}", "")
    paper.blocks([[f"> {escaped(note)}", ""] for note in verdict.notes], "notes", share=0.2)
    _write_changes(paper, verdict)
    laws = [finding for finding in verdict.findings if finding.check == "law" and finding.measured is None]
    if laws:
        paper.write("", "#### Laws that this change changes", "")
        lines = [[f"- **{escaped(finding.subject)}** {escaped(finding.message)}"] for finding in laws]
        paper.blocks(lines, "laws", share=0.4)
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
    shown = [[*map(escaped, row[:7]), code(row[7]), escaped(row[8])] for row in rows]
    paper.table(CHANGED_COLUMNS, shown, thing="changed rows", share=0.4)


def _write_all(paper: Paper, verdict: Verdict) -> None:
    """Write the tables of everything that was judged, folded."""
    tables: list[tuple[tuple[str, ...], list[Row]]] = [
        (COLUMNS, list(table_rows(verdict))), (TIME_COLUMNS, list(time_rows(verdict)))
    ]  # fmt: skip
    if not any(rows for _, rows in tables):
        return
    paper.write("", "<details><summary>Everything that was judged</summary>", "")
    for columns, rows in tables:
        if rows:
            paper.table(columns, [map(escaped, row.cells) for row in rows], thing="rows")
            paper.write("")
    paper.write("</details>")


def _folded(findings: Sequence[Finding], *, is_open: bool) -> list[str]:
    """A block that a click unfolds, with the same text as on a terminal."""
    text = "\n".join(block_lines(findings))
    if len(text) > _TEXT_LIMIT:
        text = f"{text[:_TEXT_LIMIT]}\n... {len(text) - _TEXT_LIMIT:,} more characters left out here: {_ELSEWHERE}"
    title = escaped_html(f"{checks_of(findings)}: {findings[0].subject}")
    summary = f"<details{' open' if is_open else ''}><summary>{title}</summary>"
    return [summary, "", *fenced(text), "", "</details>", ""]
