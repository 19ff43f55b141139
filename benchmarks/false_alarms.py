"""Counts how often the equality check fails unchanged code, when every gate draws different calls.

    python -m benchmarks.false_alarms [OP]... [--gates 200] [--kernels 50] [--limit SECONDS] [--jobs 2] [--json PATH]

A gate checks every form of every op in every dtype, at as many calls as ``memfix gate`` draws. The real gate always
draws the same calls; these gates draw new ones each time, which reveals a tolerance that fits only the known calls.
Interpreted kernels take longer, so they get fewer gates. Each failure is printed with the command that repeats it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

import click

from memfix.atomic_write import write_whole
from memfix.checks.children import start_worker
from memfix.checks.effort import PROFILES
from memfix.checks.equality import check_equality
from memfix.checks.plan import place_of
from memfix.contract import Contract
from memfix.provenance import describe
from memfix.registry import all_contracts, contracts

EXAMPLES = PROFILES["ci"].equality_examples


def alarms_of(op: str, seed: int, *, of_kernels: bool) -> list[tuple[str, str]]:
    """Return a pair for every form and dtype: the form, and its failure message, empty if it passed."""
    contract, said = all_contracts()[op], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype, form in checks_of(contract, of_kernels=of_kernels):
            place = place_of(contract, form, "cpu")
            found = check_equality(contract, form, dtype=dtype, place=place, examples=EXAMPLES, seed=seed)
            said.append((form, "" if found.status == "pass" else f"{found.message}\n  {found.reproduce}"))
    return said


def checks_of(contract: Contract, *, of_kernels: bool) -> list[tuple[str, str]]:
    """Return every dtype with every form to check in it, without the forms that are known to be unequal there."""
    return [
        (dtype, name)
        for dtype in contract.dtypes
        for name, form in contract.forms.items()
        if form.has_kernels == of_kernels and dtype not in form.known_unequal
    ]


@click.command(help=__doc__)
@click.argument("ops", nargs=-1, metavar="[OP]...")
@click.option("--gates", type=click.IntRange(0), default=200, show_default=True)
@click.option("--kernels", type=click.IntRange(0), default=50, show_default=True, help="Gates of forms with kernels.")
@click.option("--first", type=click.IntRange(1), default=1, show_default=True, help="The seed of the first gate.")
@click.option("--limit", type=click.FloatRange(min=0), metavar="SECONDS", help="Begin nothing after this time.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(
    ops: tuple[str, ...], gates: int, kernels: int, first: int, limit: float | None, jobs: int, path: Path | None
) -> None:
    start = time.perf_counter()
    # ordered gate by gate, so that a run that stops early has checked every op equally often
    asked = [
        (kind, seed, contract.name)
        for kind, number in (("kernels", kernels), ("torch", gates))
        for seed in range(first, first + number)
        for contract in contracts(ops)
        if checks_of(contract, of_kernels=kind == "kernels")
    ]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    running: dict[Future[list[tuple[str, str]]], tuple[int, str]] = {}
    waiting, late = asked[::-1], []
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=start_worker) as pool:
        while waiting or running:
            while waiting and len(running) < 2 * jobs:
                kind, seed, op = waiting.pop()
                running[pool.submit(alarms_of, op, seed, of_kernels=kind == "kernels")] = (seed, op)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                seed, op = running.pop(future)
                for form, alarm in future.result():
                    row = rows.setdefault((op, form), {"op": op, "form": form, "checks": 0, "alarms": 0})
                    row["checks"] += 1
                    if alarm:
                        row["alarms"] += 1
                        click.echo(f"gate {seed}, {op}/{form}: {alarm}")
            if waiting and limit is not None and time.perf_counter() - start > limit:
                late, waiting = waiting, []
    whole = {(kind, seed) for kind, seed, _ in asked} - {(kind, seed) for kind, seed, _ in late}
    number = {kind: sum(1 for other, _ in whole if other == kind) for kind in ("torch", "kernels")}
    result = {
        "surroundings": describe(),
        "gates": number["torch"],
        "gates_of_kernels": number["kernels"],
        "first_seed": first,
        "calls_of_a_check": EXAMPLES,
        "seconds": round(time.perf_counter() - start, 1),
        "forms": sorted(rows.values(), key=lambda row: (row["op"], row["form"])),
    }
    alarms = sum(row["alarms"] for row in rows.values())
    checks = sum(row["checks"] for row in rows.values())
    what = f"{number['torch']} gates and {number['kernels']} of kernels"
    click.echo(f"{alarms} of {checks} checks of unchanged code failed, in {what}")
    if path is not None:
        write_whole(path, json.dumps(result, indent=2) + "\n", "the counts")


if __name__ == "__main__":
    main()
