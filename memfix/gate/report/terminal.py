"""The verdict on a terminal: one table, then every failure in full."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..judge import Verdict
from . import COLUMNS, by_subject, checks_of, summary_line, table_rows, told_once
from .changed import TIME_COLUMNS, time_rows


def print_verdict(verdict: Verdict, console: Console) -> None:
    _print_table(console, COLUMNS, table_rows(verdict), right=("forward", "held", "train", "train below naive"))
    _print_table(console, TIME_COLUMNS, time_rows(verdict), right=("time", "pairs"))
    for note in verdict.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for finding in verdict.findings:
        if finding.check == "law" or (finding.check == "lock" and finding.status == "note"):
            console.print(Text(f"{finding.check}: {finding.text()}", style="yellow"))
    for status, word, style in (("error", "NOT MEASURED", "magenta"), ("fail", "FAILED", "red")):
        for subject, findings in by_subject(verdict.with_status(status)).items():
            console.print()
            console.print(Text(f"{checks_of(findings)} {word}", style=f"bold {style}"))
            console.print(Text("\n".join(told_once(subject, findings))), soft_wrap=True)
    console.print()
    console.print(Text(summary_line(verdict), style="bold green" if verdict.exit_code == 0 else "bold red"))


def _print_table(
    console: Console, columns: Sequence[str], rows: Iterable[tuple[str, ...]], *, right: Sequence[str]
) -> None:
    """Rows under their heads, an op named once; nothing where there are no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    previous = ""
    for op, *cells in rows:
        style = "red" if cells[-1].startswith("FAIL") else "dim" if cells[0] == "naive" else ""
        table.add_row(op if op != previous else "", *cells, style=style)
        previous = op
    if table.rows:
        console.print(table)
