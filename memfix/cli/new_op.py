"""``memfix new-op``: writes the folder of an op into a checkout of memfix."""

from __future__ import annotations

import click

from ..checks.effort import get_effort
from .options import profile_option, scaffold_options
from .output import echo_commands, progress


@click.command("new-op")
@scaffold_options
@profile_option
def new_op(
    name: str,
    naive: str,
    forms: tuple[str, ...],
    example: str,
    dtypes: str | None,
    force: bool,
    profile: str | None,
) -> int:
    """Write memfix/ops/NAME (naive, the forms, and a contract with budgets that hold today) and its manual page.

    The functions are copied, with the parts of their module that they use. All else is as in memfix init.
    """
    from ..scaffold.first_contract import Request
    from ..scaffold.new_op import new_op as write

    with progress() as say:
        request = Request.of(name, naive, forms, example, dtypes)
        files, notes = write(request, get_effort(profile), force=force, say=say)
    click.echo("\n".join([*(f"wrote {path}" for path in files), *notes]))
    echo_commands(
        {
            f"ci/gate {name} --update": "adds its entries to the lock, if all other checks pass",
            "python ci/tables.py --write": "adds its rows to the tables of the manual",
            f"memfix selftest {name}": "plants regressions in the forms: which does the contract miss?",
            "ci/test": "runs the tests; mypy needs annotations in the copied functions",
        }
    )
    return 0
