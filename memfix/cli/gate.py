"""``memfix gate``: equality, budgets and lock of every op, or with ``--time`` its times; exit 1 on a regression."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..checks.effort import get_effort
from ..gate.timing.rule import MOST_PROCESSES
from .options import json_option, meter_option, ops_argument, profile_option, progress, report_console

if TYPE_CHECKING:
    from ..contract import Contract
    from ..gate.judge import Verdict

Say = Callable[[str], None]

DEFAULT_LOCK = Path("benchmarks/memory.lock")


@click.command()
@ops_argument
@click.option(
    "--base",
    "base_ref",
    metavar="REF",
    help="Judge under the naive forms and contracts of this commit too; with --time, compare with its times.",
)
@click.option("--time", "on_time", is_flag=True, help="The gate on time: forms against --base, and against naive.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Where --time runs.  [default: cuda where there is one]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, MOST_PROCESSES),
    default=1,
    show_default=True,
    help="Ask at least so many fresh processes for --time; more are asked until they can tell.",
)
@click.option("--update", is_flag=True, help="Write today's bytes to the lock, if all else passes.")
@click.option("--lock", "lock_path", type=click.Path(path_type=Path), default=DEFAULT_LOCK, show_default=True)
@click.option("--no-lock", is_flag=True, help="Leave the lock out of it.")
@meter_option
@profile_option
@json_option
@click.option("--md", "md_path", metavar="PATH", help="Write Markdown; - for standard output.")
@click.option("--junit", "junit_path", metavar="PATH", help="Write JUnit XML; - for standard output.")
def gate(
    ops: tuple[str, ...],
    base_ref: str | None,
    on_time: bool,
    device: str | None,
    processes: int,
    update: bool,
    lock_path: Path,
    no_lock: bool,
    meter: str,
    profile: str | None,
    json_path: str | None,
    md_path: str | None,
    junit_path: str | None,
) -> int:
    """The main job: every op (or those named) equal, within budget, and no byte above the lock.

    With --time another: no form slower than at --base, nor than its contract allows beside naive.
    """
    from ..gate import report
    from ..gate.report import github
    from ..gate.report.junit import as_junit
    from ..gate.report.markdown import as_markdown
    from ..gate.report.terminal import print_verdict
    from ..registry import contracts

    context = click.get_current_context()
    if on_time:
        for name in ("update", "lock_path", "no_lock", "meter", "profile"):
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(
                    f"--time reads a clock: --{name.removesuffix('_path').replace('_', '-')} is not for it"
                )
    else:
        for name in ("device", "processes"):
            if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
                raise click.UsageError(f"--{name} is for --time; bytes are read by --meter")
    if update and no_lock:
        raise click.UsageError("--update writes the lock and --no-lock leaves it out: give one of them")
    targets = [path for path in (json_path, md_path, junit_path) if path is not None]
    if targets.count("-") > 1:
        raise click.UsageError("only one report can go to standard output")
    for path in targets:
        report.require_writable(path)
    with progress() as say:
        if on_time:
            verdict = _time_verdict(contracts(ops), device, base_ref, processes, say)
        else:
            from ..gate.run import run_gate

            verdict = run_gate(
                contracts(ops),
                meter_name=meter,
                effort=get_effort(profile),
                lock_path=None if no_lock else lock_path,
                base_ref=base_ref,
                update=update,
                whole=not ops,
                say=say,
            )
    print_verdict(verdict, report_console(to_stderr="-" in targets))
    if json_path is not None:
        report.write_report(json_path, report.as_json(verdict.as_dict()))
    if md_path is not None:
        report.write_report(md_path, as_markdown(verdict))
    if junit_path is not None:
        report.write_report(junit_path, as_junit(verdict))
    if github.on_github():
        github.announce(verdict)
    return verdict.exit_code


def _time_verdict(
    contracts: list[Contract], device: str | None, base_ref: str | None, processes: int, say: Say
) -> Verdict:
    from ..gate.timing.run import run_time_gate
    from ..meters.cuda import gpu_unavailable_reason

    chosen = device or ("cpu" if gpu_unavailable_reason() else "cuda")
    return run_time_gate(contracts, device=chosen, base_ref=base_ref, processes=processes, say=say)
