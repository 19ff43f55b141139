"""The verdict on a terminal: one table, then every failure in full."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.table import Table
from rich.text import Text

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
    told: set[tuple[str, str]] = set()  # a budget and the lock fail on one reading: what was alive is said once
    for status, style in (("error", "magenta"), ("fail", "red")):
        for finding in verdict.with_status(status):
            new = tuple(line for line in finding.details if (finding.subject, line) not in told)
            told |= {(finding.subject, line) for line in new}
            finding = replace(finding, details=new)
            console.print()
            console.print(
                Text(
                    f"{finding.check} {'FAILED' if status == 'fail' else 'NOT MEASURED'}",
                    style=f"bold {style}",
                )
            )
            console.print(Text(finding.text()), soft_wrap=True)
    console.print()
    console.print(Text(summary_line(verdict), style="bold green" if verdict.exit_code == 0 else "bold red"))
