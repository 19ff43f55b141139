"""``memfix explain``: shows what is alive at an op's peak, with source lines, as a table and as pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from . import options
from .output import Output, progress

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
    output: Output,
) -> int:
    """Show what is alive at the peak of OP, largest first, with the source line of each buffer."""
    from ..checks.measuring import measure
    from ..meters import usable_meter
    from ..meters.simulated.gpus import get_gpu
    from ..pictures import check_path, save
    from ..units import format_bytes, format_room

    for path in pictures:
        check_path(path)
    call = options.call_of(op, form_name, case_name)
    other_call = options.call_of(op, against, case_name) if against else None
    subject = f"{call.contract.name}/{call.form} [{call.draw.case.name}, {phase}]"
    meter = usable_meter("simulated", gpu)
    with progress() as say:
        say(subject)
        reading = measure(call, phase, meter)
        if other_call:
            say(f"against {other_call.form}")
            other = measure(other_call, phase, meter)
    title = f"{subject} on {reading.device}"
    capacity_bytes = get_gpu(gpu).memory_bytes
    room = format_room(reading.total_bytes, capacity_bytes)
    size, before = format_bytes(reading.peak_bytes), format_bytes(reading.base_bytes)
    above = f"peak {reading.peak_bytes:,} bytes ({size}) above {before} that existed before"
    output.line(f"{title}: {above}, {reading.certainty}; {room}", "bold")
    output.line(reading.table(rows))
    if reading.hint:
        output.line(f"likely cause: {reading.hint}")
    for note in reading.notes:
        output.line(f"note: {note}", "yellow")
    if other_call:
        output.line(f"against {other_call.form} ({format_bytes(other.peak_bytes)}):", "bold")
        for change in reading.diff(other):
            output.line(f"  {change}")
    assert reading.timeline is not None
    for path in pictures:
        save(reading.timeline, path, title, capacity_bytes)
        output.line(f"wrote {path}")
    output.write_json(lambda: {"subject": title, **reading.as_dict()})
    return 0
