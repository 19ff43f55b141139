"""The verdict as Markdown: for a file, a pull-request comment, or GitHub's job summary."""

from __future__ import annotations

from ..judge import Verdict
from . import COLUMNS, summary_line, table_rows


def as_markdown(verdict: Verdict) -> str:
    lines = [f"### {summary_line(verdict)}", ""]
    lines += [f"> {note}\n" for note in verdict.notes]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|---:|---:|---:|---:|---|"]
    lines += ["| " + " | ".join(row) + " |" for row in table_rows(verdict)]
    laws = [finding for finding in verdict.findings if finding.check == "law"]
    if laws:
        lines += ["", "#### Laws that this change changes", ""]
        lines += [f"- **{finding.subject}** {finding.message}" for finding in laws]
    for title, status in (("Failed", "fail"), ("Could not be measured", "error")):
        found = verdict.with_status(status)
        if found:
            lines += ["", f"#### {title}", ""]
            lines += [f"{finding.check}\n```\n{finding.text()}\n```" for finding in found]
    return "\n".join(lines)
