"""``memfix gate``: checks equality, budgets and the lock of every op, or its times with ``--time``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..checks.effort import get_effort
from ..errors import UsageError
from ..gate.timing.rule import LIMIT_S, MOST_PROCESSES
from ..progress import Say
from . import options
from .output import progress, report_console

if TYPE_CHECKING:
    from ..contract import Contract
    from ..gate.judge import Verdict
    from ..gate.touched import Touched

Paths = tuple[str | None, ...]
"""The paths of the JSON, Markdown, JUnit and SARIF reports."""


@click.command()
@options.ops_argument
@click.option(
    "--base",
    "base_ref",
    metavar="REF",
    help="Judge with this commit's naive forms and contracts too; with --time, compare with its times.",
)
@click.option(
    "--changed",
    "changed_ref",
    metavar="[REF]",
    is_flag=False,
    flag_value="HEAD",
    help="Check only ops with a file that differs from this commit; without REF, from HEAD (uncommitted changes). "
    "Write OPs before this option.",
)
@click.option("--time", "on_time", is_flag=True, help="Judge times, not bytes: against --base and against naive.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="The device of --time.  [default: cuda if there is a GPU]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, MOST_PROCESSES),
    default=1,
    show_default=True,
    help="Run --time in at least this many fresh processes; more are started until the result is clear.",
)
@click.option(
    "--limit",
    type=click.FloatRange(min=0, min_open=True),
    default=LIMIT_S,
    show_default=True,
    metavar="SECONDS",
    help="The most seconds of a form in one process of --time on a CPU; a longer case is halved.",
)
@click.option("--update", is_flag=True, help="Write today's bytes to the lock, if all other checks pass.")
@options.lock_option
@click.option("--no-lock", is_flag=True, help="Judge without the lock.")
@options.meter_option
@options.profile_option
@click.option("--json", "json_path", metavar="PATH", help="Write JSON; - for standard output.")
@click.option("--md", "md_path", metavar="PATH", help="Write Markdown; - for standard output.")
@click.option("--junit", "junit_path", metavar="PATH", help="Write JUnit XML; - for standard output.")
@click.option("--sarif", "sarif_path", metavar="PATH", help="Write SARIF 2.1.0; - for standard output.")
def gate(
    ops: tuple[str, ...],
    base_ref: str | None,
    changed_ref: str | None,
    on_time: bool,
    device: str | None,
    processes: int,
    limit: float,
    update: bool,
    lock_path: Path,
    no_lock: bool,
    meter: str,
    profile: str | None,
    json_path: str | None,
    md_path: str | None,
    junit_path: str | None,
    sarif_path: str | None,
) -> int:
    """Check that every op (or those named) is equal to naive, within its budgets, and no byte above the lock.

    With --time, check instead that no form is slower than at --base, or than its contract allows relative to naive.
    """
    from ..gate.definitions import with_definitions
    from ..gate.judge import Verdict

    _refuse_inapplicable_options(on_time)
    if update and no_lock:
        raise click.UsageError("--update writes the lock and --no-lock ignores it: give one of them")
    paths = json_path, md_path, junit_path, sarif_path
    _require_writable(paths)
    lock = None if no_lock else lock_path
    with progress() as say:
        notes: tuple[str, ...] = ()
        named = ops
        if changed_ref is not None:
            touched = _touched(ops, changed_ref, None if on_time else lock)
            ops, notes, named = touched.ops, (touched.note,), (*touched.ops, *touched.packages)
        any_op = changed_ref is None or bool(ops)
        # a package whose files changed is judged as if it was named: the change may have broken its import
        left_out = options.findings_of_packages_left_out(named) if changed_ref is None or named else []
        if update and left_out:
            raise UsageError(f"--update would drop the lock entries of ops that were left out: {left_out[0].message}")
        chosen = options.contracts_of(ops) if any_op else []
        if not any_op:
            verdict = Verdict((), (), meter)
        elif on_time:
            verdict = _time_verdict(chosen, device, base_ref, processes, limit, say)
        else:
            from ..gate.run import run_gate

            verdict = run_gate(
                chosen, meter_name=meter, effort=get_effort(profile), lock_path=lock, base_ref=base_ref,
                update=update, whole=not ops, say=say,
            )  # fmt: skip
    findings = options.with_from_option((*verdict.findings, *left_out))
    verdict = replace(verdict, notes=(*notes, *verdict.notes), findings=findings)
    verdict = with_definitions(verdict, chosen)
    _write_reports(verdict, paths)
    return verdict.exit_code


def _touched(ops: tuple[str, ...], ref: str, lock: Path | None) -> Touched:
    """Return those of the named ops and packages, or of all, that a file changed since ``ref`` touches."""
    from ..gate.touched import touched_ops
    from ..registry import contracts

    # contracts() refuses an unknown name, even if nothing is touched
    touched = touched_ops(ref, lock, [contract.name for contract in contracts(ops)] if ops else ())
    return replace(touched, packages=tuple(each for each in touched.packages if not ops or each in ops))


def _refuse_inapplicable_options(on_time: bool) -> None:
    context = click.get_current_context()
    for name in ("update", "lock_path", "no_lock", "meter", "profile") if on_time else ("device", "processes", "limit"):
        if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE:
            option = f"--{name.removesuffix('_path').replace('_', '-')}"
            raise click.UsageError(
                f"{option} does not apply to --time" if on_time else f"{option} applies only to --time"
            )


def _time_verdict(
    contracts: list[Contract], device: str | None, base_ref: str | None, processes: int, limit_s: float, say: Say
) -> Verdict:
    from ..gate.timing.run import run_time_gate
    from ..meters.cuda import gpu_unavailable_reason

    chosen = device or ("cpu" if gpu_unavailable_reason() else "cuda")
    return run_time_gate(contracts, device=chosen, base_ref=base_ref, processes=processes, limit_s=limit_s, say=say)


def _require_writable(paths: Paths) -> None:
    from ..gate.report import require_writable

    if paths.count("-") > 1:
        raise click.UsageError("only one report can go to standard output")
    for path in paths:
        require_writable(path)


def _write_reports(verdict: Verdict, paths: Paths) -> None:
    """Print the verdict, write the requested files, and annotate the run on GitHub."""
    from ..gate.report import as_json, github, write_report
    from ..gate.report.junit import as_junit
    from ..gate.report.markdown import as_markdown
    from ..gate.report.sarif import as_sarif
    from ..gate.report.terminal import print_verdict

    print_verdict(verdict, report_console(to_stderr="-" in paths))
    formats: tuple[Callable[[Verdict], str], ...] = (
        lambda verdict: as_json(verdict.as_dict()), as_markdown, as_junit, as_sarif
    )  # fmt: skip
    for path, as_text in zip(paths, formats, strict=True):
        if path is not None:
            write_report(path, as_text(verdict))
    if github.on_github():
        github.announce(verdict)
