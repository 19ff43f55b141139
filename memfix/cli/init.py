"""``memfix init``: writes a contract, its tests, its lock and a workflow into the user's repository."""

from __future__ import annotations

from pathlib import Path

import click

from ..checks.effort import get_effort
from .options import profile_option, scaffold_options
from .output import echo_commands, progress


@click.command()
@scaffold_options
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("tests/memory"),
    show_default=True,
    help="The folder of the test file and the lock.",
)
@profile_option
def init(
    name: str,
    naive: str,
    forms: tuple[str, ...],
    example: str,
    dtypes: str | None,
    force: bool,
    folder: Path,
    profile: str | None,
) -> int:
    """Write the first contract of your op NAME, with budgets that hold today.

    \b
    memfix init my_loss --naive my_package.losses:dense_loss --form chunked=my_package.losses:chunked_loss \\
        --example tests/example_call.py:call

    call() returns the arguments of one call, as a dict by name or as a tuple. Dims, dtypes, gradients and ranges are
    read from its tensors. Axes of equal size become one dim, so give different dims different sizes. Nothing is
    written unless the forms equal naive.
    """
    from ..scaffold.first_contract import Request
    from ..scaffold.init import init as write

    with progress() as say:
        request = Request.of(name, naive, forms, example, dtypes)
        written = write(request, folder, get_effort(profile), force=force, say=say)
    for path in written.files:
        click.echo(f"wrote {path}")
    for path in written.kept:
        click.echo(f"kept  {path}, which exists already; --force overwrites it")
    click.echo("\n".join(written.notes))
    echo_commands(written.commands(name))
    return 0
