"""How often equality fails unchanged code, where every gate draws other calls.

    python -m benchmarks.false_alarms [OP]... [--gates 200] [--kernels 50] [--jobs 2] [--json PATH]

A gate is every form of every op in every dtype, at as many calls as ``memfix gate`` draws. The real one always draws
the same; these have other calls each, so a tolerance that fits only the known calls shows. Kernels are interpreted,
which takes longer, so there are fewer gates of them. Each failure is printed with the line that repeats it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from memfix.checks.children import take_one_core
from memfix.checks.effort import PROFILES
from memfix.checks.equality import check_equality
from memfix.contract import Contract
from memfix.files import write_whole
from memfix.registry import all_contracts, contracts
from memfix.surroundings import describe

EXAMPLES = PROFILES["ci"].equality_examples


def alarms_of(op: str, seed: int, *, of_kernels: bool) -> list[tuple[str, str]]:
    """For every form and dtype the form, and what to read; nothing to read where it passed."""
    contract, said = all_contracts()[op], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for dtype, form in checks_of(contract, of_kernels=of_kernels):
            found = check_equality(contract, form, dtype=dtype, examples=EXAMPLES, seed=seed)
            said.append((form, "" if found.status == "pass" else f"{found.message}\n  {found.reproduce}"))
    return said


def checks_of(contract: Contract, *, of_kernels: bool) -> list[tuple[str, str]]:
    """Dtypes with forms, which are held against the same calls; none that are known to be unequal."""
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
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(ops: tuple[str, ...], gates: int, kernels: int, jobs: int, path: Path | None) -> None:
    start = time.perf_counter()
    # kernels first: they take longest; and gate by gate, so that a run that is ended early has asked of all ops
    asked = [
        (contract.name, seed, of_kernels)
        for of_kernels, number in ((True, kernels), (False, gates))
        for seed in range(1, 1 + number)
        for contract in contracts(ops)
        if checks_of(contract, of_kernels=of_kernels)
    ]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=take_one_core) as pool:
        running = {pool.submit(alarms_of, op, seed, of_kernels=kind): (op, seed) for op, seed, kind in asked}
        for future in as_completed(running):
            op, seed = running[future]
            for form, alarm in future.result():
                row = rows.setdefault((op, form), {"op": op, "form": form, "checks": 0, "alarms": 0})
                row["checks"] += 1
                if alarm:
                    row["alarms"] += 1
                    click.echo(f"gate {seed}, {op}/{form}: {alarm}")
    result = {
        "surroundings": describe(),
        "gates": gates,
        "gates_of_kernels": kernels,
        "calls_of_a_check": EXAMPLES,
        "seconds": round(time.perf_counter() - start, 1),
        "forms": sorted(rows.values(), key=lambda row: (row["op"], row["form"])),
    }
    alarms = sum(row["alarms"] for row in rows.values())
    click.echo(f"{alarms} of {sum(row['checks'] for row in rows.values())} checks of unchanged code failed")
    if path is not None:
        write_whole(path, json.dumps(result, indent=2) + "\n", "the counts")


if __name__ == "__main__":
    main()
