"""``memfix profile``: shows the memory of an incident's train step by stage, beside the figures of its report."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from .options import gpu_option, json_option, meter_option, pictures_option, progress, report_console, with_step_options

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

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
    json_path: str | None,
) -> int:
    """Show the memory of INCIDENT's train step, stage by stage, beside the figures of its report.

    It is the same step as in memfix train: from a config file, with keys overridden as in data.context_length=4096.
    """
    from ..gate import report
    from ..incidents import get_incident
    from ..incidents.incident import load_config
    from ..incidents.profile_step import profile as measured
    from ..pictures import check_path, save
    from ..provenance import describe

    report.require_writable(json_path)
    for path in pictures:
        check_path(path)
    of = get_incident(incident)
    config = load_config(of, config_file or of.config, overrides)
    with progress() as say:
        found = measured(of, config, meter=meter, gpu=gpu, world_size=world_size, capacity=capacity, say=say)
    console = report_console(to_stderr=json_path == "-")
    _print(console, found, rows)
    for path in pictures:
        if found.reading.timeline is None:
            console.print(Text(f"no picture {path}: the {meter} meter does not see single buffers", style="yellow"))
            continue
        save(found.reading.timeline, path, found.title, found.capacity_bytes)
        console.print(Text(f"wrote {path}"))
    if json_path is not None:
        report.write_report(json_path, report.as_json({"surroundings": describe(), **found.as_dict()}))
    return 0


def _print(console: Console, found: Profile, rows: int) -> None:
    from ..pictures.stages import ABOUT_ASIDES, ASIDE_MARK
    from ..units import format_bytes

    console.print(Text(found.title, style="bold"), soft_wrap=True)
    console.print(Text(found.headline, style="bold"), soft_wrap=True)
    console.print(_table(found))
    if any(row.aside for row in found.rows):
        console.print(Text(f"{ASIDE_MARK}{ABOUT_ASIDES}", style="dim"))
    if found.runs:
        console.print(_runs_table(found))
    for conclusion in found.conclusions:
        console.print(Text(conclusion), soft_wrap=True)
    for note in found.reading.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if rows and found.reading.timeline is not None:
        console.print(Text("what holds the memory at the peak of each stage", style="bold"))
        for row in found.rows:
            console.print(Text(f"{row.stage.name}: {format_bytes(row.stage.peak_bytes)}"), soft_wrap=True)
            for holder in row.holders(rows):
                console.print(Text(f"  {holder}", style="dim"), soft_wrap=True)


def _table(found: Profile) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("stage", "at its end", "peak", "report", "remark"):
        table.add_column(name, justify="right" if name in ("at its end", "peak") else "left", overflow="fold")
    for row in found.rows:
        table.add_row(*_cells(row, found.capacity_bytes), style="dim" if row.aside else "")
    return table


def _runs_table(found: Profile) -> Table:
    from ..incidents.profile import TEXT_COLUMNS, run_columns

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    columns = run_columns(found.runs, found.reading.meter, found.capacity_bytes)
    for name in columns:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right", overflow="fold")
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
