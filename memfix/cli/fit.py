"""``memfix fit``: finds the largest size of an op, or of an incident's train step, that fits a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import click
from rich.text import Text

from .options import (
    call_of,
    case_option,
    form_option,
    gpu_option,
    json_option,
    phase_option,
    progress,
    report_console,
    with_step_options,
)

if TYPE_CHECKING:
    from ..incidents.config import RunConfig
    from ..incidents.incident import Incident
    from ..laws import Phase


@click.command()
@click.argument("name", metavar="OP|INCIDENT")
@form_option
@case_option
@phase_option
@click.option(
    "--over",
    metavar="DIM,...|KEY",
    help="Of an op: the dims to find the largest value of, each in turn. Of an incident: the section.key to grow.",
)
@click.option(
    "--capacity",
    metavar="24GiB,...",
    help="What must suffice; of an incident also several.  [default: the GPU's memory]",
)
@click.option("--high", type=click.IntRange(min=1), help="Try nothing larger.")
@gpu_option
@json_option
@with_step_options
@click.pass_context
def fit(
    context: click.Context,
    name: str,
    form_name: str | None,
    case_name: str | None,
    phase: Phase,
    over: str | None,
    capacity: str | None,
    high: int | None,
    gpu: str,
    json_path: str | None,
    overrides: tuple[str, ...],
    config_file: str | None,
    world_size: int,
) -> int:
    """The largest value of each dim with which OP fits, the others as in the case; or of a key of INCIDENT's config,
    such as its context or its layers, with which its train step fits. By predicted peaks."""
    from ..incidents import incident_names

    if name in incident_names():
        _refuse_given(context, ("form_name", "case_name", "phase"), f"{name} is an incident")
        from ..incidents import get_incident
        from ..incidents.config import load_config

        incident = get_incident(name)
        config = load_config(incident, config_file or incident.config, overrides)
        return _fit_incident(incident, config, over, capacity, high, gpu, world_size, json_path)
    _refuse_given(context, ("overrides", "config_file", "world_size"), f"{name} is an op, not an incident")
    if over is None:
        raise click.UsageError("Missing option '--over'.")
    return _fit_op(name, form_name, case_name, phase, over, capacity, high, gpu, json_path)


def _refuse_given(context: click.Context, names: Iterable[str], reason: str) -> None:
    """Refuse options that do not apply to what is fitted."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            spelled = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.make_metavar(context)
            raise click.UsageError(f"{reason}: {spelled} has no meaning here")


def _fit_incident(
    incident: Incident,
    config: RunConfig,
    over: str | None,
    capacity: str | None,
    high: int | None,
    gpu: str,
    world_size: int,
    json_path: str | None,
) -> int:
    from ..errors import EXIT_NOT_MEASURED, EXIT_PASS
    from ..gate import report
    from ..incidents.fit_step import fit_step, growth_of
    from ..meters.simulated.gpus import get_gpu
    from ..units import format_bytes

    report.require_writable(json_path)
    growth, described = growth_of(incident, over), get_gpu(gpu)
    capacities = [described.memory_bytes] if capacity is None else [part.strip() for part in capacity.split(",")]
    with progress() as say:
        found = fit_step(incident, config, growth, capacities, gpu=gpu, high=high, world_size=world_size, say=say)
    console = report_console(to_stderr=json_path == "-")
    for result in found:
        bound = " (the largest that was allowed)" if result.bounded else ""
        smallest = f"not even {result.tried[0].value:,} {growth.unit}"
        largest = f"{result.value:,} {growth.unit}{bound}" if result.value else smallest
        title = f"{incident.name} on {described.name}, {format_bytes(result.capacity_bytes)}: {largest}"
        console.print(Text(title, style="bold"), soft_wrap=True)
        console.print(Text(result.table()), soft_wrap=True)
    if json_path is not None:
        report.write_report(json_path, report.as_json({growth.key: [result.as_dict() for result in found]}))
    return EXIT_PASS if any(result.value for result in found) else EXIT_NOT_MEASURED


def _fit_op(
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

            unit = contract.dims[dim].multiple_of
            low = max(unit, contract.dims[dim].low)
            top = high or max(DEFAULT_HIGH, case.dims[dim])
            if top < low:
                raise UsageError(f"--high: {dim} of {op} is at least {low}, got {top}")
            start = max(low, min(case.dims[dim], top))
            found[dim] = largest(step_of, limit, gpu=gpu, start=start, low=low, high=top, multiple_of=unit)
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
