"""How the commands in this folder end: one line for each known trouble, and memfix's exit codes."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from memfix.errors import EXIT_USAGE, MemfixError


def run(command: click.Command, name: str) -> NoReturn:
    """0 fine, 2 could not measure, 4 usage."""
    try:
        sys.exit(command.main(prog_name=f"python -m benchmarks.{name}", standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except MemfixError as error:
        click.echo(f"{name}: {error} (exit {error.exit_code})", err=True)
        sys.exit(error.exit_code)
