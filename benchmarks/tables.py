"""Figures of several races side by side, a row for each contender."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table


def print_rows(
    console: Console,
    corner: str,
    headings: Sequence[str],
    columns: Sequence[Mapping[str, Any]],
    cell: Callable[[Any], str],
) -> None:
    """A column for each of ``columns``, by contender; one who is not in a column has an empty cell there."""
    if not columns:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(corner)
    for heading in headings:
        table.add_column(heading, justify="right")
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(cell(column[name]) if name in column else "" for column in columns))
    console.print(table)
    console.print()
