"""``memfix selftest``: plants regressions in the forms of an op and reports which of them its contract misses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checks.effort import get_effort
from ..errors import EXIT_PASS, EXIT_REGRESSION, UsageError, did_you_mean
from .options import contracts_of, json_option, lock_option, ops_argument, profile_option
from .output import Output, progress

if TYPE_CHECKING:
    from ..contract import Contract
    from ..selftest.run import Outcome


@click.command()
@ops_argument
@click.option("--form", "form_name", metavar="FORM", help="Plant regressions only in the code of this form.")
@click.option("--mutants", type=click.IntRange(min=1), help="Plant at most this many per op.  [default: all]")
@click.option("--seed", type=int, default=0, show_default=True, help="The seed of their random choice and order.")
@click.option("--limit", type=click.FloatRange(min=0), metavar="SECONDS", help="Stop after this time.")
@click.option(
    "--least",
    type=click.FloatRange(0, 100),
    metavar="PERCENT",
    help="Exit with 1 if a smaller share of those caught or missed was caught.",
)
@lock_option
@click.option("--no-lock", is_flag=True, help="Find what the contract catches without a lock.")
@profile_option
@json_option
def selftest(
    ops: tuple[str, ...],
    form_name: str | None,
    mutants: int | None,
    seed: int,
    limit: float | None,
    least: float | None,
    lock_path: Path,
    no_lock: bool,
    profile: str | None,
    output: Output,
) -> int:
    """Plant regressions in a copy of every op (or those named) and run the gate's checks on them, without a GPU.

    A regression that no check catches is tested further. It is equal if many more calls and shapes give the same
    bits and bytes, missed if one of them is wrong or larger, or if no check runs its line, and undecided otherwise.

    Exits with 0 even if regressions were missed, unless --least asks for a share.
    """
    import os

    from ..gate.lock import read_lock
    from ..provenance import describe
    from ..selftest.report import as_data, print_report, share_caught

    if not hasattr(os, "fork"):
        raise UsageError("memfix selftest runs every mutant in a forked process, and this system cannot fork")
    chosen = contracts_of(ops)
    known = [name for contract in chosen for name in contract.forms]
    if form_name is not None and form_name not in known:
        raise UsageError(f"no form {form_name!r}{did_you_mean(form_name, known)}")
    lock = None if no_lock else read_lock(lock_path)
    until = None if limit is None else time.monotonic() + limit
    with progress() as say:
        outcomes, late = _planted(
            [contract for contract in chosen if form_name is None or form_name in contract.forms],
            form=form_name, effort=get_effort(profile), lock=lock, most=mutants, seed=seed, until=until, say=say,
        )  # fmt: skip
    print_report(outcomes, output.console)
    if late:
        output.line(f"the time limit was reached before anything was planted in {', '.join(late)}")
    if lock is not None and not {contract.name for contract in chosen} <= {key[0] for key in lock}:
        output.line(f"note: {lock_path} has no entry of some ops: there, only budgets bound their bytes")
    settings = {"profile": get_effort(profile).name, "seed": seed, "most": mutants}
    output.write_json(lambda: {"surroundings": describe(), **settings, **as_data(outcomes)})
    share = share_caught(outcomes)
    return EXIT_REGRESSION if least is not None and (share is None or share < least) else EXIT_PASS


def _planted(contracts: Sequence[Contract], **settings: Any) -> tuple[list[Outcome], list[str]]:
    """Return the outcome of every planted regression, and the ops that were skipped for lack of time."""
    from ..selftest.run import TimeIsOver, run_selftest

    outcomes: list[Outcome] = []
    late: list[str] = []
    for contract in contracts:
        try:
            outcomes += run_selftest(contract, **settings)
        except TimeIsOver:
            late.append(contract.name)
    return outcomes, late
