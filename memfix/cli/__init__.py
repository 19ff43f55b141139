"""The command line. Each file has one command: it parses options, calls the library, prints a report and exits."""

from __future__ import annotations

import click

from .. import __version__
from .calibrate import calibrate
from .check import check
from .ending import run
from .explain import explain
from .fit import fit
from .gate import gate
from .incidents import incidents
from .init import init
from .list import list_ops
from .new_op import new_op
from .profile import profile
from .ready import ready
from .selftest import selftest
from .train import train


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="memfix")
def cli() -> None:
    """Prove memory fixes: check that every memory-saving op is equal to its naive reference, small and fast.

    Exit codes: 0 pass, 1 regression, 2 could not measure, 4 usage.
    """


for command in (
    gate,
    check,
    list_ops,
    explain,
    fit,
    calibrate,
    profile,
    incidents,
    train,
    ready,
    selftest,
    init,
    new_op,
):
    cli.add_command(command)


def main() -> None:
    run(cli, "memfix")
