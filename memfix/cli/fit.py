"""``memfix fit``: the largest chunk, batch or context of an op that fits a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from rich.text import Text

from .options import (
    call_of,
    case_option,
    form_option,
    gpu_option,
    json_option,
    one_op_argument,
    phase_option,
    progress,
    report_console,
)

if TYPE_CHECKING:
    from ..laws import Phase


@click.command()
@one_op_argument
@form_option
@case_option
@phase_option
@click.option("--over", metavar="DIM,...", required=True, help="Dims to find the largest value of, each in turn.")
@click.option("--capacity", metavar="24GiB", help="What must suffice.  [default: the GPU's memory]")
@click.option("--high", type=click.IntRange(min=1), help="Try nothing larger.")
@gpu_option
@json_option
def fit(
    op: str,
    form_name: str | None,
    case_name: str | None,
    phase: Phase,
    over: str,
    capacity: str | None,
    high: int | None,
    gpu: str,
    json_path: str | None,
) -> int:
    """The largest value of each dim with which OP fits, the others as in the case; by bisection on predicted peaks."""
    from ..checks.inputs import Draw, StepOf
    from ..errors import UsageError, did_you_mean
    from ..fit import DEFAULT_HIGH, Fit
    from ..fit import fit as largest
    from ..gate import report
    from ..meters.simulated.gpus import get_gpu
    from ..units import format_bytes

    report.require_writable(json_path)
    contract, form, case = call_of(op, form_name, case_name)
    dims = [dim.strip() for dim in over.split(",")]
    for dim in dims:
        if dim not in contract.dims:
            raise UsageError(f"--over: {op} has no dim {dim!r}{did_you_mean(dim, contract.dims)}")
    described = get_gpu(gpu)
    limit = capacity if capacity is not None else described.memory_bytes
    found: dict[str, Fit] = {}
    console = report_console(to_stderr=json_path == "-")
    with progress() as say:
        for dim in dims:

            def step_of(value: int, dim: str = dim) -> StepOf:
                say(f"{op}/{form}: {dim}={value}")
                changed = contract.case_of(case.name, {**case.settings, "dtype": case.dtype, dim: value})
                return StepOf(contract, form, Draw(changed), phase)

            low = max(1, contract.dims[dim].low)
            top = high or max(DEFAULT_HIGH, case.dims[dim])
            if top < low:
                raise UsageError(f"--high: {dim} of {op} is at least {low}, got {top}")
            start = max(low, min(case.dims[dim], top))
            found[dim] = largest(step_of, limit, gpu=gpu, start=start, low=low, high=top)
    for dim, result in found.items():
        bound = " (the largest that was allowed)" if result.bounded else ""
        console.print(
            Text(f"{op}/{form} [{case.name}, {phase}] on {described.name}, {format_bytes(result.capacity_bytes)}: "
                 f"{dim} = {result.value:,}{bound}", style="bold"),
            soft_wrap=True,
        )  # fmt: skip
        console.print(Text(result.table()), soft_wrap=True)
    if json_path is not None:
        report.write_report(json_path, report.as_json({dim: result.as_dict() for dim, result in found.items()}))
    return 0
