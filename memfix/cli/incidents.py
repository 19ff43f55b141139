"""``memfix incidents``: judges the claims of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click
from rich.text import Text

from .options import json_option
from .output import Output, plain_table, progress

if TYPE_CHECKING:
    from ..incidents.claims import Claim
    from ..incidents.judging import JudgedClaim


@click.command()
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--claim", "claim_names", metavar="ID", multiple=True, help="Judge only this claim; may be repeated.")
@click.option("--quick", is_flag=True, help="Leave out claims that need a simulation of the whole model.")
@json_option
def incidents(name: str | None, claim_names: tuple[str, ...], quick: bool, output: Output) -> int:
    """List the incidents, or judge the claims of incident NAME: whether each holds, and what is true.

    Exits with 1 if a verdict or value differs from the recorded one: the replay has drifted.
    """
    if name is not None:
        return _judge(name, claim_names, quick, output)
    if claim_names or quick:
        raise click.UsageError("--claim and --quick choose among the claims of one incident: give its NAME")
    return _list(output)


def _list(output: Output) -> int:
    from ..incidents import incident_names
    from ..incidents.claims import VERDICTS, counts, load_claims

    claims = {name: load_claims(name) for name in incident_names()}
    recorded = {name: counts(claim.verdict for claim in of_one) for name, of_one in claims.items()}
    table = plain_table("incident", "claims", *VERDICTS)
    for name, of_one in claims.items():
        table.add_row(name, str(len(of_one)), *map(str, recorded[name].values()))
    in_all = [claim.verdict for of_one in claims.values() for claim in of_one]
    table.add_row("all", str(len(in_all)), *map(str, counts(in_all).values()))
    output.console.print(table)
    output.line("these verdicts are recorded; memfix incidents NAME computes them again", "dim")
    rows = [{"name": name, "claims": len(claims[name]), "recorded": recorded[name]} for name in claims]
    output.write_json(lambda: {"incidents": rows})
    return 0


def _judge(name: str, claim_names: Sequence[str], quick: bool, output: Output) -> int:
    from ..errors import EXIT_PASS, EXIT_REGRESSION, UsageError
    from ..incidents.claims import chosen_claims, load_claims
    from ..incidents.judging import judge_claims, load_checks

    named = chosen_claims(load_claims(name), claim_names)
    if not named:
        raise UsageError(f"incident {name} has no claims")
    chosen = [claim for claim in named if not (quick and claim.slow)]
    left_out = [claim for claim in named if claim not in chosen]
    if not chosen:
        raise UsageError(f"--quick leaves out every chosen claim: {_ids(left_out)}")
    with progress() as say:
        judged = list(judge_claims(chosen, load_checks(name), say=say))
    _print(output, judged, left_out)
    output.write_json(
        lambda: {
            "incident": name,
            "claims": [claim.as_dict() for claim in judged],
            "left_out": [claim.id for claim in left_out],
        }
    )
    return EXIT_REGRESSION if any(claim.drifted for claim in judged) else EXIT_PASS


def _print(output: Output, judged: Sequence[JudgedClaim], left_out: Sequence[Claim]) -> None:
    from ..gate.report import counted
    from ..incidents.claims import counts

    table = plain_table("claim", "the report says", "verdict", "what is true", no_wrap=("claim", "verdict"))
    for one in judged:
        table.add_row(one.claim.id, _statement(one.claim), _verdict(one), _truth(one))
    output.console.print(table)
    by_verdict = counts(one.verdict for one in judged)
    summary = ", ".join(f"{verdict} {number}" for verdict, number in by_verdict.items())
    output.line(f"{counted(len(judged), 'claim')}: {summary}", "bold")
    if left_out:
        output.line(f"left out by --quick: {_ids(left_out)}", "yellow")
    drifted = [one for one in judged if one.drifted]
    if drifted:
        output.line("the results differ from the recorded ones: the replay has drifted", "bold red")
        for one in drifted:
            said = one.failed or "; ".join(one.drift)
            output.line(f"  {one.claim.id}: {said}")


def _statement(claim: Claim) -> Text:
    lines = "lines" if "-" in claim.lines or "," in claim.lines else "line"
    return Text.assemble(claim.statement, (f" ({lines} {claim.lines})", "dim"))


_STYLES = {"holds": "green", "wrong": "red", "not testable": "dim"}


def _verdict(judged: JudgedClaim) -> Text:
    if judged.verdict is None:
        return Text("failed", style="bold red")
    return Text(judged.verdict, style=_STYLES[judged.verdict])


def _truth(judged: JudgedClaim) -> Text:
    return Text.assemble(judged.failed or judged.true, (f" [{judged.how}]" if judged.how else "", "dim"))


def _ids(claims: Sequence[Claim]) -> str:
    return ", ".join(claim.id for claim in claims)
