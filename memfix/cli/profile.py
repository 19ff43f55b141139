"""``memfix profile``: shows the memory of an incident's train step by stage, beside the figures of its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import gpu_option, json_option, meter_option, pictures_option, with_step_options
from .output import Output, plain_table, progress

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from ..incidents.profile import Profile, Row


@click.command()
@click.argument("incident", metavar="INCIDENT")
@click.option("--capacity", metavar="24GiB", help="The memory to fit in.  [default: that of the report's GPU]")
@with_step_options
@meter_option
@gpu_option
@click.option(
    "--rows", type=click.IntRange(min=0), default=3, show_default=True, help="The largest holders shown per stage."
)
@pictures_option
@json_option
def profile(
    incident: str,
    overrides: tuple[str, ...],
    config_file: str | None,
    world_size: int,
    capacity: str | None,
    meter: str,
    gpu: str,
    rows: int,
    pictures: tuple[str, ...],
    output: Output,
) -> int:
    """Show the memory of INCIDENT's train step, stage by stage, beside the figures of its report.

    It is the same step as in memfix train: from a config file, with keys overridden as in data.context_length=4096.
    """
    from ..incidents import get_incident
    from ..incidents.incident import load_config
    from ..incidents.profile_step import profile as measured
    from ..pictures import check_path, save
    from ..provenance import describe

    for path in pictures:
        check_path(path)
    chosen = get_incident(incident)
    config = load_config(chosen, config_file or chosen.config, overrides)
    with progress() as say:
        found = measured(chosen, config, meter=meter, gpu=gpu, world_size=world_size, capacity=capacity, say=say)
    _print(output, found, rows)
    for path in pictures:
        if found.reading.timeline is None:
            output.line(f"no picture {path}: the {meter} meter does not see single buffers", "yellow")
            continue
        save(found.reading.timeline, path, found.title, found.capacity_bytes)
        output.line(f"wrote {path}")
    output.write_json(lambda: {"surroundings": describe(), **found.as_dict()})
    return 0


def _print(output: Output, found: Profile, rows: int) -> None:
    from ..pictures.stages import ABOUT_ASIDES, ASIDE_MARK
    from ..units import format_bytes

    output.line(found.title, "bold")
    output.line(found.headline, "bold")
    output.console.print(_table(found))
    if any(row.aside for row in found.rows):
        output.line(f"{ASIDE_MARK}{ABOUT_ASIDES}", "dim")
    if found.runs:
        output.console.print(_runs_table(found))
    for conclusion in found.conclusions:
        output.line(conclusion)
    for note in found.reading.notes:
        output.line(f"note: {note}", "yellow")
    if rows and found.reading.timeline is not None:
        output.line("what holds the memory at the peak of each stage", "bold")
        for row in found.rows:
            output.line(f"{row.stage.name}: {format_bytes(row.stage.peak_bytes)}")
            for holder in row.holders(rows):
                output.line(f"  {holder}", "dim")


def _table(found: Profile) -> Table:
    table = plain_table("stage", "at its end", "peak", "report", "remark", right=("at its end", "peak"))
    for row in found.rows:
        table.add_row(*_cells(row, found.capacity_bytes), style="dim" if row.aside else "")
    return table


def _runs_table(found: Profile) -> Table:
    from ..incidents.profile import TEXT_COLUMNS, run_columns

    columns = run_columns(found.runs, found.reading.meter, found.capacity_bytes)
    table = plain_table(*columns, right=columns.keys() - TEXT_COLUMNS)
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table


def _cells(row: Row, capacity_bytes: int) -> Iterator[str]:
    from ..pictures.stages import ASIDE_MARK
    from ..units import format_bytes

    stage, reported = row.stage, row.reported
    yield f"{ASIDE_MARK if row.aside else ''}{stage.name}"
    yield "-" if row.failed else format_bytes(stage.end_bytes)
    yield format_bytes(stage.peak_bytes)
    yield reported.figure if reported else ""
    said = [f"{reported.why} ({reported.claim})"] if reported else []
    if row.failed:
        said.append(row.failed)
    elif stage.peak_bytes > capacity_bytes:
        said.append(f"more than the GPU's {format_bytes(capacity_bytes)}")
    yield "; ".join(said)
