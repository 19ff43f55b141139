"""``memfix calibrate``: checks the workspace rules on this machine's GPU, or shows which rules were checked on one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from .options import gpu_option, json_option
from .output import Output, progress

if TYPE_CHECKING:
    from ..calibration.run import Calibration
    from ..meters.simulated.gpus import GPU

SHOWN_MISSES = 40


@click.command()
@click.option("--run", "do_run", is_flag=True, help="Measure this machine's GPU and write its table.")
@click.option("--only", metavar="TEXT", multiple=True, help="Update the table: only probes with TEXT in their name.")
@click.option("--step", metavar="MODULE:FUNCTION", help="Update the table: only the convolutions of this step.")
@click.option("--out", type=click.Path(path_type=Path), help="The table's file.  [default: in your own tables]")
@gpu_option
@json_option
def calibrate(do_run: bool, only: tuple[str, ...], step: str | None, out: Path | None, gpu: str, output: Output) -> int:
    """Show which rules for kernels' workspaces were measured on a GPU, and which are assumed.

    With --run each operator's workspace is measured on this machine's GPU over a range of shapes and compared with
    its rule; exits with 1 if a rule is wrong. Convolutions of well-known networks are measured too (--only cudnn
    measures nothing else). --step train.py:build measures those of your own step; build is as for memfix.peak.
    """
    from ..meters.simulated.gpus import get_gpu

    if not do_run:
        if only or step or out:
            raise click.UsageError("--only, --step and --out belong to --run")
        return _show(get_gpu(gpu), output)
    from ..atomic_write import write_whole
    from ..calibration.convolutions import convolutions_of, known_convolutions
    from ..calibration.run import all_probes
    from ..calibration.run import calibrate as probe
    from ..errors import UsageError
    from ..meters.simulated.tables import file_name, own_tables, read_table, table_of
    from ..scaffold.references import function_named

    def is_chosen(name: str) -> bool:
        return any(text in name for text in only) if only or step else True

    probes = {name: build for name, build in all_probes().items() if is_chosen(name)}
    convolutions = known_convolutions() if is_chosen("cudnn") else []
    if only and not probes and not convolutions:
        raise UsageError(f"--only: no probe's name contains {' or '.join(map(repr, only))}")
    if step is not None:
        convolutions += convolutions_of(function_named("--step", step))
    with progress() as say:
        found = probe(probes, convolutions, say)
    _print_run(found, output)
    path, table = out or own_tables() / file_name(found.table.gpu), found.table
    if only or step:
        before = read_table(path) if path.exists() else table_of(table.gpu)
        table = before.updated(table) if before is not None else table
    write_whole(path, table.as_text(), "the table")
    output.line(f"wrote {path}")
    output.write_json(
        lambda: {
            "observations": [vars(seen) | {"missed": seen.is_mispredicted} for seen in found.observations],
            "failures": dict(found.failures),
        }
    )
    return 1 if any(seen.is_mispredicted for seen in found.observations) else 0


def _print_run(found: Calibration, output: Output) -> None:
    missed = [seen for seen in found.observations if seen.is_mispredicted]
    unknown = [seen for seen in found.observations if seen.predicted is None and not seen.is_mispredicted]
    for seen in missed[:SHOWN_MISSES]:
        rule = "no rule" if seen.predicted is None else f"its rule says {seen.predicted:,}"
        kept = f", keeps {seen.kept:,} (expected {seen.predicted_kept:,})" if seen.kept != seen.predicted_kept else ""
        line = f"missed: takes {seen.measured:,} bytes of workspace ({rule}){kept}  {seen.signature}"
        output.line(line, "red")
    for name, reason in found.failures.items():
        output.line(f"did not run: {name}: {reason}", "yellow")
    output.line(
        f"{found.table.gpu.name}: {len(found.observations):,} calls of {len(found.table.operators)} operators: "
        f"{len(found.observations) - len(missed) - len(unknown):,} agree with their rule, {len(missed)} missed, "
        f"{len(unknown)} without a rule"
    )
    if found.table.convolutions:
        output.line(f"{len(found.table.convolutions):,} convolutions of cuDNN stored as measured")


def _show(gpu: GPU, output: Output) -> int:
    """Show for every rule whether it was checked on ``gpu``."""
    from ..meters.simulated.tables import Standing, table_of
    from ..meters.simulated.workspace.rules import NONE_NEEDED, RULES

    table = table_of(gpu)
    names = {str(packet).removeprefix("aten."): packet for packet in {*RULES, *NONE_NEEDED}}
    standings: dict[str, str] = {}
    for name, packet in sorted(names.items()):
        seen = (table.operators.get(str(packet)) if table else None) or Standing()
        if seen.missed:
            standings[name] = f"missed {seen.missed} of {seen.calls} calls"
        else:
            known = seen.calls - seen.unknown
            standings[name] = f"calibrated, {known} calls" if known else "assumed"
    counts = {word: sum(s.startswith(word) for s in standings.values()) for word in ("calibrated", "missed", "assumed")}
    if table is None:
        output.line(f"{gpu.name}: never measured; every rule is assumed, and readings are estimates")
        output.line("run memfix calibrate --run on a machine that has one")
    else:
        where = ", ".join(
            f"{key} {table.surroundings.get(key, 'unknown')}" for key in ("torch", "cuda", "cudnn", "driver", "date")
        )
        output.line(f"{gpu.name}: measured with {where}")
        for name, standing in standings.items():
            style = "green" if standing.startswith("calibrated") else "red" if standing.startswith("missed") else "dim"
            output.line(f"  {name:<52} {standing}", style)
        kinds = f"{len(table.measured)} calls without a rule and {len(table.convolutions):,} convolutions of cuDNN"
        output.line(f"  stored as measured: {kinds}")
    output.line(", ".join(f"{count} {word}" for word, count in counts.items()))
    output.write_json(lambda: {"gpu": gpu.name, "rules": standings})
    return 0
