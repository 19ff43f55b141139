"""What commands print: lines, tables, JSON, the progress line and the next commands."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ..progress import Say, silent

FILE_WIDTH = 150


def echo_commands(commands: Mapping[str, str]) -> None:
    """Print the next commands, each with what it does."""
    width = max(map(len, commands))
    click.echo("next:")
    for command, does in commands.items():
        click.echo(f"  {command:<{width}}  # {does}")


class Output:
    """Where a command prints its lines and tables, and where its JSON goes.

    Tables go to standard error if the JSON goes to standard output. A path that cannot be written is refused at once.
    """

    def __init__(self, json_path: str | None) -> None:
        from ..gate.report import require_writable

        require_writable(json_path)
        self.json_path = json_path
        self.console = report_console(to_stderr=json_path == "-")

    def line(self, text: str, style: str = "") -> None:
        """Print a text that is not wrapped and has no markup."""
        self.console.print(Text(text, style=style), soft_wrap=True)

    def write_json(self, data: Callable[[], Mapping[str, Any]]) -> None:
        """Write ``data()``, if JSON is asked for."""
        from ..gate.report import as_json, write_report

        if self.json_path is not None:
            write_report(self.json_path, as_json(data()))


def plain_table(*columns: str, right: Collection[str] = (), no_wrap: Collection[str] = ()) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in right else "left"
        table.add_column(name, justify=justify, overflow="fold", no_wrap=name in no_wrap)
    return table


def report_console(*, to_stderr: bool) -> Console:
    """The console for tables: as wide as the terminal, or wide enough for every column in a file or a CI log."""
    console = Console(stderr=to_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


@contextmanager
def progress() -> Iterator[Say]:
    """Yield a function that shows the current activity on standard error, if that is a terminal.

    The line is drawn only when the function is called: the host meter would count a thread that refreshes it.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield silent
        return
    with Live("starting", console=console, auto_refresh=False, transient=True) as line:
        yield lambda text: line.update(text, refresh=True)
