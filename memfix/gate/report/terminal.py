"""The verdict on a terminal: one table, then every failure in full."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ...laws import NAIVE
from ..judge import Verdict
from .escape import without_commands
from .github import on_github
from .table import COLUMNS, RIGHT, TIME_COLUMNS, Row, table_rows, time_rows
from .text import block_lines, by_subject, checks_of, summary_line


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the verdict; in a GitHub log without lines that its runner would take for commands."""
    if not on_github():
        _print_all(verdict, console)
        return
    with console.capture() as printed:
        _print_all(verdict, console)
    console.file.write(without_commands(printed.get()))


def _print_all(verdict: Verdict, console: Console) -> None:
    _print_table(console, COLUMNS, table_rows(verdict))
    _print_table(console, TIME_COLUMNS, time_rows(verdict))
    for note in verdict.notes:
        console.print(Text(f"note: {note}", style="yellow"))
    for finding in verdict.findings:
        if finding.check == "law" or (finding.check == "lock" and finding.status == "note"):
            console.print(Text(f"{finding.check}: {finding.text()}", style="yellow"))
    for status, word, style in (("error", "NOT MEASURED", "magenta"), ("fail", "FAILED", "red")):
        for findings in by_subject(verdict.with_status(status)).values():
            console.print()
            console.print(Text(f"{checks_of(findings)} {word}", style=f"bold {style}"))
            console.print(Text("\n".join(block_lines(findings))), soft_wrap=True)
    console.print()
    console.print(Text(summary_line(verdict), style="bold green" if verdict.exit_code == 0 else "bold red"))


def _print_table(console: Console, columns: tuple[str, ...], rows: Iterable[Row]) -> None:
    """Print rows below their column names, each op named once; nothing where there are no rows."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in RIGHT else "left", no_wrap=True)
    previous = ""
    for row in rows:
        op, *cells = row.cells
        style = "red" if row.failed else "dim" if cells[0] == NAIVE else ""
        table.add_row(op if op != previous else "", *cells, style=style)
        previous = op
    if table.rows:
        console.print(table)
