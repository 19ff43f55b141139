"""``memfix fit``: finds the largest size of an op, or of an incident's train step, that fits a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from . import options
from .output import Output, progress

if TYPE_CHECKING:
    from ..checks.form_call import FormCall
    from ..contract import Case, Contract
    from ..incidents.config import RunConfig
    from ..incidents.incident import Incident
    from ..laws import Phase
    from ..progress import Say


@click.command()
@options.with_ops(click.argument("name", metavar="OP|INCIDENT"))
@click.option("--form", "form_name", metavar="FORM", help="The form.  [default: the one with the smallest peak]")
@options.case_option
@options.phase_option
@click.option(
    "--over",
    metavar="DIM,...|KEY",
    help="Of an op: the dims to grow, one after another. Of an incident: the section.key to grow, or world_size "
    "to find the fewest ranks.",
)
@click.option(
    "--capacity",
    metavar="24GiB,...",
    help="The memory to fit in; several sizes only for an incident.  [default: the GPU's memory]",
)
@click.option("--high", type=click.IntRange(min=1), help="The largest value to try.")
@options.gpu_option
@options.json_option
@options.with_step_options
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
    output: Output,
    overrides: tuple[str, ...],
    config_file: str | None,
    world_size: int,
) -> int:
    """Find the largest sizes that fit a GPU, by predicted peaks.

    Of an OP: the largest value of each dim, with the other dims as in the case. Of an INCIDENT: the largest value of
    a key of its config, such as its context or its layers, with which its train step fits; or the fewest ranks."""
    from ..incidents import incident_names

    if name in incident_names():
        _refuse_given(context, ("form_name", "case_name", "phase"), f"{name} is an incident")
        from ..incidents import get_incident
        from ..incidents.fit_step import WORLD_SIZE
        from ..incidents.incident import load_config

        if over == WORLD_SIZE:
            _refuse_given(context, ("world_size",), "--over world_size searches the number of ranks")
        incident = get_incident(name)
        config = load_config(incident, config_file or incident.config, overrides)
        return _fit_incident(incident, config, over, capacity, high, gpu, world_size, output)
    _refuse_given(context, ("overrides", "config_file", "world_size"), f"{name} is an op, not an incident")
    if over is None:
        raise click.UsageError("Missing option '--over'.")
    return _fit_op(name, form_name, case_name, phase, over, capacity, high, gpu, output)


def _refuse_given(context: click.Context, names: Iterable[str], reason: str) -> None:
    """Refuse the options in ``names`` if the command line has them, because they do not apply here."""
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and given:
            spelled = parameter.opts[0] if isinstance(parameter, click.Option) else parameter.make_metavar(context)
            raise click.UsageError(f"{reason}: {spelled} does not apply")


def _fit_incident(
    incident: Incident,
    config: RunConfig,
    over: str | None,
    capacity: str | None,
    high: int | None,
    gpu: str,
    world_size: int,
    output: Output,
) -> int:
    from ..errors import EXIT_NOT_MEASURED, EXIT_PASS
    from ..incidents.fit_step import WORLD_SIZE, fit_step, fit_world, growth_of
    from ..meters.simulated.gpus import get_gpu
    from ..units import format_bytes

    growth, described = None if over == WORLD_SIZE else growth_of(incident, over), get_gpu(gpu)
    key, unit = (WORLD_SIZE, "ranks") if growth is None else (growth.key, growth.unit)
    capacities = [described.memory_bytes] if capacity is None else [part.strip() for part in capacity.split(",")]
    with progress() as say:
        if growth is None:
            found = fit_world(incident, config, capacities, gpu=gpu, high=high, say=say)
        else:
            found = fit_step(incident, config, growth, capacities, gpu=gpu, high=high, world_size=world_size, say=say)
    for result in found:
        answer = result.answer("{:,} " + unit)
        title = f"{incident.name} on {described.name}, {format_bytes(result.capacity_bytes)}: {answer}"
        output.line(title, "bold")
        output.line(result.table())
    output.write_json(lambda: {key: [result.as_dict() for result in found]})
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
    output: Output,
) -> int:
    from ..checks.form_call import StepOf
    from ..errors import EXIT_NOT_MEASURED, EXIT_PASS, MemfixError
    from ..fit import DoesNotFit, Fit, bytes_of_capacity
    from ..fit import fit as largest
    from ..meters.simulated.gpus import get_gpu
    from ..units import format_bytes

    call = options.call_of(op, form_name, case_name)
    contract, form, case = call.contract, call.form, call.draw.case
    described = get_gpu(gpu)
    capacity_bytes = bytes_of_capacity(described.memory_bytes if capacity is None else capacity)
    searches = {dim: _bounds(contract, case, dim, high) for dim in [dim.strip() for dim in over.split(",")]}
    found: dict[str, Fit] = {}
    failed: dict[str, str] = {}
    with progress() as say:
        if form_name is None:
            form, sizes = _smallest_form(call, phase, gpu, say)
        for dim, bounds in searches.items():

            def step_of(value: int, dim: str = dim) -> StepOf:
                say(f"{contract.name}/{form}: {dim}={value:,}")
                settings = {**case.settings, "dtype": case.dtype, "present": case.present, dim: value}
                draw = replace(call.draw, case=contract.case_of(case.name, settings))
                return StepOf(contract, form, draw, phase)

            try:
                found[dim] = largest(step_of, capacity_bytes, gpu=gpu, **bounds)
            except DoesNotFit as error:
                found[dim] = error.fit
            except Exception as error:  # the answers for the other dims are kept
                failed[dim] = str(error) if isinstance(error, MemfixError) else f"{type(error).__name__}: {error}"
    if form_name is None:
        output.line(f"{form} has the smallest peak of {sizes}; --form chooses another", "dim")
    subject = f"{contract.name}/{form} [{case.name}, {phase}] on {described.name}, {format_bytes(capacity_bytes)}"
    for dim in searches:
        if dim in failed:
            output.line(f"{subject}: {dim} could not be searched: {failed[dim]}", "bold")
            continue
        output.line(f"{subject}: {found[dim].answer(dim + ' = {:,}')}", "bold")
        output.line(found[dim].table())
    output.write_json(
        lambda: {dim: found[dim].as_dict() if dim in found else {"error": failed[dim]} for dim in searches}
    )
    return EXIT_PASS if all(dim in found and found[dim].value for dim in searches) else EXIT_NOT_MEASURED


def _bounds(contract: Contract, case: Case, dim: str, high: int | None) -> dict[str, Any]:
    """Return where the search over ``dim`` starts and its lowest and highest values, as arguments of ``fit``."""
    from ..errors import UsageError, did_you_mean
    from ..fit import DEFAULT_HIGH

    if dim not in contract.dims:
        raise UsageError(f"--over: {contract.name} has no dim {dim!r}{did_you_mean(dim, contract.dims)}")
    unit = contract.dims[dim].multiple_of
    low = max(unit, contract.dims[dim].low)
    top = high or max(DEFAULT_HIGH, case.dims[dim])
    if top < low:
        raise UsageError(f"--high: {dim} of {contract.name} is at least {low}, got {top}")
    return {"start": max(low, min(case.dims[dim], top)), "low": low, "high": top, "multiple_of": unit}


def _smallest_form(call: FormCall, phase: Phase, gpu: str, say: Say) -> tuple[str, str]:
    """Return the form with the smallest peak, and a text with all peaks. Reported forms are left out."""
    from ..errors import MeasurementError
    from ..measure import peak
    from ..units import format_bytes

    contract, case = call.contract, call.draw.case
    peaks: dict[str, int] = {}
    for name, form in contract.forms.items():
        if form.reported or form.known_unequal:
            continue
        say(f"{contract.name}/{name}: the peak at {case.name}")
        with contextlib.suppress(Exception):  # a form that cannot be measured here is not chosen
            peaks[name] = peak(call.of(name).step(phase), gpu=gpu).peak_bytes
    if not peaks:
        raise MeasurementError(f"no form of {contract.name} could be measured at {case.name}; name one with --form")
    spelled = ", ".join(f"{name} {format_bytes(size)}" for name, size in peaks.items())
    return min(peaks, key=peaks.__getitem__), spelled
