"""The verdict on a terminal: one table, then every failure in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...checks.finding import Finding
from ..judge import Verdict
from . import COLUMNS, summary_line, table_rows


def print_verdict(verdict: Verdict, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        right = column in ("forward", "held", "train", "train below naive")
        table.add_column(column, justify="right" if right else "left", no_wrap=True)
    previous = ""
    for op, *cells in table_rows(verdict):
        style = "red" if cells[-1].startswith("FAIL") else "dim" if cells[0] == "naive" else ""
        table.add_row(op if op != previous else "", *cells, style=style)
        previous = op
    console.print(table)
    for note in verdict.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for finding in verdict.findings:
        if finding.check == "law" or (finding.check == "lock" and finding.status == "note"):
            console.print(Text(f"{finding.check}: {finding.text()}", style="yellow"))
    for status, word, style in (("error", "NOT MEASURED", "magenta"), ("fail", "FAILED", "red")):
        for subject, findings in _by_subject(verdict.with_status(status)).items():
            checks = ", ".join(dict.fromkeys(finding.check for finding in findings))
            console.print()
            console.print(Text(f"{checks} {word}", style=f"bold {style}"))
            console.print(Text("\n".join(_told_once(subject, findings))), soft_wrap=True)
    console.print()
    console.print(Text(summary_line(verdict), style="bold green" if verdict.exit_code == 0 else "bold red"))


def _by_subject(findings: Iterable[Finding]) -> dict[str, list[Finding]]:
    """Several budgets and the lock often fail on one reading: they are one block, the lock's exact bytes first."""
    blocks: dict[str, list[Finding]] = {}
    for finding in sorted(findings, key=lambda finding: finding.check != "lock"):
        blocks.setdefault(finding.subject, []).append(finding)
    return blocks


def _told_once(subject: str, findings: Sequence[Finding]) -> list[str]:
    """Every message, then every line below them, each once."""
    first, *others = dict.fromkeys(finding.message for finding in findings)
    lines = [f"{subject}: {first}", *(f"  {message}" for message in others)]
    lines += dict.fromkeys(line for finding in findings for line in finding.details)
    return lines + [f"  reproduce: {finding.reproduce}" for finding in findings if finding.reproduce]
