"""Options that several commands share, under the same words as the pytest options; and the progress line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click
from rich.console import Console

from ..checks.effort import PROFILES
from ..meters import METERS

FILE_WIDTH = 150

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

ops_argument: Decorator = click.argument("ops", nargs=-1, metavar="[OP]...")
meter_option: Decorator = click.option(
    "--meter", type=click.Choice(METERS), default="simulated", show_default=True, help="What reads the peak."
)
profile_option: Decorator = click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    help="How many shapes are drawn.  [default: ci, or $MEMFIX_PROFILE]",
)
json_option: Decorator = click.option("--json", "json_path", metavar="PATH", help="Write JSON; - for standard output.")


def report_console(*, to_stderr: bool) -> Console:
    """Where tables go: as wide as the terminal, and wide enough for every column in a file or a CI log."""
    console = Console(stderr=to_stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH
    return console


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A line on standard error that says what is under way; nothing where nobody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status("starting") as status:
        yield status.update
