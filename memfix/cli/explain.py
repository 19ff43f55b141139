"""``memfix explain``: shows what is alive at an op's peak, with source lines, as a table and as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.text import Text

from . import options

if TYPE_CHECKING:
    from ..laws import Phase


@click.command()
@options.one_op_argument
@options.form_option
@options.case_option
@options.phase_option
@options.gpu_option
@click.option("--against", metavar="FORM", help="Also show how the peak differs from that of this form.")
@click.option("--rows", type=click.IntRange(min=1), default=20, show_default=True, help="The most rows of the table.")
@options.pictures_option
@options.json_option
def explain(
    op: str,
    form_name: str | None,
    case_name: str | None,
    phase: Phase,
    gpu: str,
    against: str | None,
    rows: int,
    pictures: tuple[str, ...],
    json_path: str | None,
) -> int:
    """Show what is alive at the peak of OP, largest first, with the source line of each buffer."""
    from ..checks.form_call import FormCall
    from ..checks.inputs import Draw
    from ..checks.measuring import measure
    from ..gate import report
    from ..meters import usable_meter
    from ..meters.simulated.gpus import get_gpu
    from ..pictures import check_path, save
    from ..units import format_bytes, format_room

    report.require_writable(json_path)
    for path in pictures:
        check_path(path)
    contract, form, case = options.call_of(op, form_name, case_name)
    other_form = options.call_of(op, against, case_name)[1] if against else None
    meter, _ = usable_meter("simulated", gpu)
    with options.progress() as say:
        say(f"{op}/{form} [{case.name}, {phase}]")
        reading = measure(FormCall(contract, form, Draw(case)), phase, meter)
        if other_form:
            say(f"{op}/{other_form} [{case.name}, {phase}]")
            other = measure(FormCall(contract, other_form, Draw(case)), phase, meter)
    title = f"{op}/{form} [{case.name}, {phase}] on {reading.device}"
    console = options.report_console(to_stderr=json_path == "-")
    capacity_bytes = get_gpu(gpu).memory_bytes
    room = format_room(reading.total_bytes, capacity_bytes)
    console.print(
        Text(f"{title}: peak {reading.peak_bytes:,} bytes ({format_bytes(reading.peak_bytes)}) above "
             f"{format_bytes(reading.base_bytes)} that existed before, {reading.certainty}; {room}", style="bold"),
        soft_wrap=True,
    )  # fmt: skip
    console.print(Text(reading.table(rows)), soft_wrap=True)
    if reading.hint:
        console.print(Text(f"likely cause: {reading.hint}"), soft_wrap=True)
    for note in reading.notes:
        console.print(Text(f"note: {note}", style="yellow"), soft_wrap=True)
    if other_form:
        console.print(Text(f"against {other_form} ({format_bytes(other.peak_bytes)}):", style="bold"))
        for change in reading.diff(other):
            console.print(Text(f"  {change}"), soft_wrap=True)
    assert reading.timeline is not None
    for path in pictures:
        save(reading.timeline, path, title, capacity_bytes)
        console.print(Text(f"wrote {path}"))
    if json_path is not None:
        report.write_report(json_path, report.as_json({"subject": title, **reading.as_dict()}))
    return 0
