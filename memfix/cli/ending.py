"""Runs a command and turns every known error into one line and an exit code."""

from __future__ import annotations

import sys
from typing import NoReturn

import click

from ..errors import EXIT_USAGE, MemfixError


def run(command: click.Command, name: str) -> NoReturn:
    """Run ``command`` and exit: 0 pass, 1 regression, 2 could not measure, 4 usage."""
    try:
        sys.exit(command.main(prog_name=name, standalone_mode=False))
    except click.exceptions.Abort:
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(EXIT_USAGE)
    except MemfixError as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(error.exit_code)
