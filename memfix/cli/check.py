"""``memfix check``: runs the gate's checks without the lock, with a chosen profile or for one given call."""

from __future__ import annotations

import click

from ..checks.finding import Finding, exit_code_of
from ..errors import UsageError, did_you_mean
from . import options
from .output import Output, progress


@click.command()
@options.ops_argument
@click.option("--form", "form_name", metavar="FORM", help="Check only this form.")
@click.option("--examples", type=click.IntRange(min=1), help="Calls drawn per form and dtype, different every time.")
@click.option("--at", metavar="N=3,...", help="Check only this call, as a failure prints it.")
@click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    default="cpu",
    show_default=True,
    help="The device of equality and speed.",
)
@click.option("--speed", is_flag=True, help="Also time forms against naive.")
@options.meter_option
@options.profile_option
@options.json_option
def check(
    ops: tuple[str, ...],
    form_name: str | None,
    examples: int | None,
    at: str | None,
    device: str,
    speed: bool,
    meter: str,
    profile: str | None,
    output: Output,
) -> int:
    """Check equality, bad inputs and budgets of every op (or those named), without the lock."""
    import secrets

    from ..checks.effort import Effort, get_effort
    from ..checks.examine import examine, examine_call
    from ..checks.inputs import Draw
    from ..checks.speed import check_speed
    from ..meters import usable_meter
    from ..provenance import describe

    chosen = options.contracts_of(ops)
    if at is not None and len(chosen) != 1:
        raise click.UsageError("--at needs exactly one OP")
    if form_name is not None and not any(form_name in contract.forms for contract in chosen):
        known = [name for contract in chosen for name in contract.forms]
        raise UsageError(f"no form {form_name!r}{did_you_mean(form_name, known)}")
    effort = get_effort(profile)
    if examples is not None:
        effort = Effort("asked", examples, max(1, examples // 5), seed=secrets.randbits(32))
    used_meter = usable_meter(meter)
    findings: list[Finding] = options.findings_of_packages_left_out(ops)
    with progress() as say:
        for contract in chosen:
            forms = [form for form in contract.forms if form_name in (None, form)]
            if at is not None:
                draw = Draw.parsed(contract, at)
                made = list(examine_call(contract, draw, used_meter, forms=forms, device=device, say=say))
            else:
                made = list(examine(contract, used_meter, effort, say, forms=forms, device=device).findings)
                timed = [law for law in contract.speed if speed and law.form in forms and law.device == device]
                made += [check_speed(contract, law) for law in timed]
            made = list(options.with_from_option(made))
            for finding in made:
                style = {"fail": "red", "error": "magenta", "note": "dim"}.get(finding.status, "")
                output.line(f"{finding.status:<5} {finding.check:<9} {finding.text()}", style)
            findings += made
    output.write_json(lambda: {"surroundings": describe(), "findings": [finding.as_dict() for finding in findings]})
    return exit_code_of(findings)
