"""Options that several commands share, named like the pytest options."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..checks.effort import PROFILES
from ..meters import GPU_METERS
from .output import Output

if TYPE_CHECKING:
    from ..checks.finding import Finding
    from ..checks.form_call import FormCall
    from ..contract import Contract

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _read_contracts_from(context: click.Context, parameter: click.Parameter, paths: tuple[str, ...]) -> None:
    from ..registry import FILES_VARIABLE

    if paths:
        os.environ[FILES_VARIABLE] = os.pathsep.join(paths)  # worker processes inherit it
        context.call_on_close(lambda: os.environ.pop(FILES_VARIABLE, None))


from_option: Decorator = click.option(
    "--from", metavar="PATH", multiple=True, expose_value=False, callback=_read_contracts_from,
    help="Use only the contracts of this file or folder, such as a test file with memfix.suite.",
)  # fmt: skip


def with_ops(argument: Decorator) -> Decorator:
    """Combine an argument that names ops with the option ``--from``."""
    return lambda command: from_option(argument(command))


one_op_argument: Decorator = with_ops(click.argument("op", metavar="OP"))
form_option: Decorator = click.option("--form", "form_name", metavar="FORM", help="The form.  [default: naive]")
case_option: Decorator = click.option(
    "--case", "case_name", metavar="CASE", help="The case, or a variant such as frozen=x.  [default: the first case]"
)
phase_option: Decorator = click.option(
    "--phase", type=click.Choice(["forward", "held", "train"]), default="train", show_default=True,
    help="forward: without gradients; train: forward and backward; held: the bytes kept between the two.",
)  # fmt: skip
gpu_option: Decorator = click.option(
    "--gpu", metavar="GPU", default="H200", show_default=True, help="The GPU to simulate."
)
pictures_option: Decorator = click.option(
    "--save", "pictures", metavar="PATH", multiple=True,
    help="Save the timeline as .png, .svg, .html, .pickle (for PyTorch's memory viewer) or .json (for Perfetto).",
)  # fmt: skip
ops_argument: Decorator = with_ops(click.argument("ops", nargs=-1, metavar="[OP]..."))
meter_option: Decorator = click.option(
    "--meter", type=click.Choice(GPU_METERS), default="simulated", show_default=True, help="What measures the memory."
)
profile_option: Decorator = click.option(
    "--profile",
    type=click.Choice(list(PROFILES)),
    help="How many shapes to draw.  [default: ci, or $MEMFIX_PROFILE]",
)
lock_option: Decorator = click.option(
    "--lock", "lock_path", type=click.Path(path_type=Path), default=Path("benchmarks/memory.lock"), show_default=True,
    help="The lock file.",
)  # fmt: skip
overrides_argument: Decorator = click.argument("overrides", nargs=-1, metavar="[SECTION.KEY=VALUE]...")
CONFIG_HELP = "The run's config: a YAML file, or the name of one that comes with the incident."

# former options -> the config keys that replaced them
_MOVED = {
    "--model-size": "model.size",
    "--attention-type": "model.attention_type",
    "--context-length": "data.context_length",
    "--gradient-checkpointing": "training.gradient_checkpointing",
    "--no-gradient-checkpointing": "training.gradient_checkpointing",
    "--batch-size": "training.batch_size",
    "--loss": "model.loss_form",
    "--precision": "training.precision",
}
_RENAMED_VALUES = {"--precision bfloat16": "pure_bfloat16", "--precision mixed": "autocast"}


def _refuse_moved(context: click.Context, parameter: click.Parameter, value: Any) -> None:
    if value is None or value is False:
        return
    option = parameter.opts[0]
    said = option if value is True else f"{option} {value}"
    is_off = option.startswith("--no-")
    now = _RENAMED_VALUES.get(said, str(not is_off).lower() if value is True else value)
    raise click.UsageError(f"{said} is now a key of the config; write {_MOVED[option]}={now} instead")


json_option: Decorator = click.option(
    "--json", "output", metavar="PATH", help="Write JSON; - for standard output.",
    callback=lambda context, parameter, path: Output(path),
)  # fmt: skip


def with_step_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that choose a train step: an incident's config, overridden keys, and the number of ranks."""
    options: list[Decorator] = [
        click.option("--config", "config_file", metavar="FILE", help=f"{CONFIG_HELP}  [default: the report's step]"),
        click.option(
            "--world-size",
            type=int,
            default=1,
            show_default=True,
            help="The number of ranks to shard over with FSDP2; one of them is simulated.",
        ),
        overrides_argument,
    ]
    for name in _MOVED:
        is_flag = "checkpointing" in name
        options.append(click.option(name, hidden=True, expose_value=False, callback=_refuse_moved, is_flag=is_flag))
    for option in reversed(options):
        command = option(command)
    return command


def contracts_of(ops: Sequence[str]) -> list[Contract]:
    """Return the contracts of these ops, or all. Prints on standard error why packages could not be loaded."""
    from ..registry import contracts, registered

    chosen = contracts(ops)
    for _, reason in registered().left_out:
        click.echo(f"memfix: left out: {reason}", err=True)
    return chosen


def findings_of_packages_left_out(ops: Sequence[str]) -> list[Finding]:
    """Return an error finding for each package that could not be loaded whole, if all ops are checked or this package
    is named: else the check would pass without its ops."""
    from ..checks.finding import Finding
    from ..registry import registered

    named = "; repair it, or name the ops and packages to judge without it"
    left_out = [each for each in registered().left_out if not ops or each[0] in ops]
    return [Finding("contract", package, "", "error", f"{reason}{named}") for package, reason in left_out]


def with_from_option(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Return the findings with the files of ``--from`` added to the commands that reproduce them."""
    from ..registry import FILES_VARIABLE

    files = "".join(
        f" --from {shlex.quote(path)}" for path in os.environ.get(FILES_VARIABLE, "").split(os.pathsep) if path
    )
    return tuple(replace(f, reproduce=f.reproduce + files) if f.reproduce and files else f for f in findings)


def call_of(op: str, form_name: str | None, case_name: str | None) -> FormCall:
    """Return the call of the form of ``op`` with this name at this case or variant; by default naive and the first
    case. ``op`` may also be a package with one op."""
    from ..checks.form_call import FormCall
    from ..checks.variants import variants
    from ..errors import UsageError, did_you_mean

    contract, *others = contracts_of([op])
    if others:
        names = ", ".join(each.name for each in (contract, *others))
        raise UsageError(f"{op} is a package of several ops; name one of {names}")
    form, case = form_name or "naive", case_name or next(iter(contract.cases))
    forms = ["naive", *contract.forms]
    if form not in forms:
        raise UsageError(f"{contract.name} has no form {form!r}{did_you_mean(form, forms)}")
    cases = [*contract.cases, *variants(contract)]
    if case not in cases:
        raise UsageError(f"{contract.name} has no case {case!r}{did_you_mean(case, cases)}")
    return FormCall.at_case(contract, form, case)


def _prompt_if_missing(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """Return an option's value; if it is missing, prompt for it on a terminal, else raise an error."""
    if value:
        return value
    assert isinstance(parameter, click.Option)
    if not sys.stdin.isatty():
        raise click.MissingParameter(ctx=context, param=parameter)
    answer = click.prompt(f"{parameter.help} {parameter.metavar}", err=True)
    return (answer,) if parameter.multiple else answer


def scaffold_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that a first contract needs: the functions, and an example call."""
    options: list[Decorator] = [
        click.argument("name", metavar="NAME"),
        click.option(
            "--naive", metavar="MODULE:FUNCTION", callback=_prompt_if_missing,
            help="The reference: a function that is right.",
        ),
        click.option(
            "--form", "forms", metavar="NAME=MODULE:FUNCTION", multiple=True, callback=_prompt_if_missing,
            help="A function that computes the same in less memory.",
        ),
        click.option(
            "--example", metavar="FILE.py:FUNCTION", callback=_prompt_if_missing,
            help="A function that returns the arguments of one call.",
        ),
        click.option("--dtypes", metavar="DTYPE,...", help="Dtypes in which the forms must work.  [default: all four]"),
        click.option("--force", is_flag=True, help="Overwrite files that exist."),
    ]  # fmt: skip
    for option in reversed(options):
        command = option(command)
    return command
