"""``memfix ready``: checks whether the GPU is ready for timing."""

from __future__ import annotations

import dataclasses

import click

from .options import json_option
from .output import Output


@click.command()
@click.option("--wait", type=click.FloatRange(0), default=0.0, help="Seconds to wait for a busy GPU.")
@json_option
def ready(wait: float, output: Output) -> int:
    """Check that the GPU is idle and its clocks are not limited. Exits with 2 if not, or if there is no GPU.

    Prints clocks, power, temperature and what limits the clocks; --json writes them.
    """
    from ..meters.readiness import ready_within

    reading = ready_within(wait)
    output.write_json(lambda: dataclasses.asdict(reading))
    output.line(reading.line())
    reading.require()
    return 0
