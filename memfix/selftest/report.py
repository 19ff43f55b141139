"""Prints what a self-test found: a table by kind, how many each check caught, and every survivor with its diff."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .operators import KINDS
from .run import Outcome

COLUMNS = ("planted", "caught", "equal", "undecided", "missed", "never run", "not asked")


def counts(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Count outcomes by column. A mutant whose line no check runs counts as ``missed`` and as ``never run``."""
    verdicts = Counter(outcome.verdict for outcome in outcomes)
    never_run = sum(outcome.is_never_run for outcome in outcomes)
    return {"planted": len(outcomes), **{name: verdicts[name] for name in COLUMNS[1:]}, "never run": never_run}


def share_caught(outcomes: Sequence[Outcome]) -> float | None:
    """Return the share caught of those caught or missed, in per cent; None if there are none."""
    found = counts(outcomes)
    decided = found["caught"] + found["missed"]
    return 100 * found["caught"] / decided if decided else None


def by_kind(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found = {kind: [outcome for outcome in outcomes if outcome.mutant.kind == kind] for kind in KINDS}
    return {kind: some for kind, some in found.items() if some}


def caught_by(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Return how many mutants each check caught, the most first."""
    return dict(Counter(outcome.check for outcome in outcomes if outcome.verdict == "caught").most_common())


def as_data(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    ops = dict.fromkeys(outcome.op for outcome in outcomes)
    return {
        "ops": {op: _of_some([outcome for outcome in outcomes if outcome.op == op]) for op in ops},
        "all": _of_some(outcomes),
        "survivors": [
            {"op": o.op, "kind": o.mutant.kind, "verdict": o.verdict, "why": o.why, "diff": o.mutant.diff}
            for o in outcomes
            if o.verdict in ("missed", "undecided", "equal")
        ],
    }


def _of_some(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    kinds = {kind: {**counts(some), "share_caught": share_caught(some)} for kind, some in by_kind(outcomes).items()}
    shares = {"share_caught": share_caught(outcomes), "caught_by": caught_by(outcomes), "kinds": kinds}
    return {**counts(outcomes), **shares}


def print_report(outcomes: Sequence[Outcome], console: Console) -> None:
    for outcome in outcomes:
        if outcome.verdict in ("missed", "undecided"):
            style = "red" if outcome.verdict == "missed" else "yellow"
            title = f"{outcome.verdict}: {outcome.op}, {outcome.mutant.kind}: {outcome.why}"
            console.print(Text(title, style=style), soft_wrap=True)
            console.print(Text(outcome.mutant.diff + "\n"), soft_wrap=True)
    table = Table("regression", box=None)
    for name in (*COLUMNS, "share caught"):
        table.add_column(name, justify="right")
    for kind, some in by_kind(outcomes).items():
        table.add_row(kind, *_cells(some))
    table.add_row("all", *_cells(outcomes), style="bold")
    console.print(table)
    if said := ", ".join(f"{check} {number}" for check, number in caught_by(outcomes).items()):
        console.print(Text(f"caught by: {said}"), soft_wrap=True)
    if not_asked := counts(outcomes)["not asked"]:
        text = f"the time limit was reached: {not_asked} of {len(outcomes)} were not checked"
        console.print(Text(text), soft_wrap=True)
    if not outcomes:
        console.print(Text("nothing was planted: no operator finds a place in the forms"))


def _cells(outcomes: Sequence[Outcome]) -> list[str]:
    share = share_caught(outcomes)
    return [*map(str, counts(outcomes).values()), "-" if share is None else f"{share:.1f} %"]
