"""``memfix ready``: checks whether the GPU is ready for timing."""

from __future__ import annotations

import dataclasses

import click

from .options import json_option


@click.command()
@click.option("--wait", type=click.FloatRange(0), default=0.0, help="Seconds to wait for a busy GPU.")
@json_option
def ready(wait: float, json_path: str | None) -> int:
    """Check that the GPU is idle and its clocks are not limited. Exits with 2 if not, or if there is no GPU.

    Prints clocks, power, temperature and what limits the clocks; --json writes them.
    """
    from ..gate import report
    from ..meters.readiness import ready_within

    report.require_writable(json_path)
    reading = ready_within(wait)
    if json_path is not None:
        report.write_report(json_path, report.as_json(dataclasses.asdict(reading)))
    click.echo(reading.line(), err=json_path == "-")
    reading.require()
    return 0
