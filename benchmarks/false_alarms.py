"""How often equality fails unchanged code, where every call is drawn anew.

    python -m benchmarks.false_alarms [--gates 200] [--kernels 50] [--jobs 2] [--json PATH]

A gate is every form of every op in every dtype, at as many calls as ``memfix gate`` draws. Its own calls are always the
same ones; these are others each time, so a tolerance that fits only the known calls shows. Kernels are interpreted,
which takes longer, so there are fewer gates of them. Each failure is printed with the line that repeats it.
"""

from __future__ import annotations

import itertools
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
from memfix.files import write_whole
from memfix.registry import all_contracts
from memfix.surroundings import describe

EXAMPLES = PROFILES["ci"].equality_examples


def one_check(op: str, form: str, dtype: str) -> tuple[str, str]:
    """How it ended, and what to read where it did not pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        finding = check_equality(all_contracts()[op], form, dtype=dtype, examples=EXAMPLES, random=True)
    return finding.status, f"{finding.message}\n  {finding.reproduce}"


def checks_of(*, with_kernels: bool) -> list[tuple[str, str, str]]:
    """Of forms with kernels, or of all others; none that are known to be unequal, which need not be so every time."""
    return [
        (contract.name, name, dtype)
        for contract in all_contracts().values()
        for name, form in contract.forms.items()
        for dtype in contract.dtypes
        if form.has_kernels == with_kernels and dtype not in form.known_unequal
    ]


@click.command(help=__doc__)
@click.option("--gates", type=click.IntRange(0), default=200, show_default=True)
@click.option("--kernels", type=click.IntRange(0), default=50, show_default=True, help="Gates of forms with kernels.")
@click.option("--jobs", type=click.IntRange(1), default=2, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path))
def main(gates: int, kernels: int, jobs: int, path: Path | None) -> None:
    start = time.perf_counter()
    kinds = {False: gates, True: kernels}
    asked = itertools.chain.from_iterable(checks_of(with_kernels=kind) * number for kind, number in kinds.items())
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=take_one_core) as pool:
        running = {pool.submit(one_check, *check): check for check in asked}
        for future in as_completed(running):
            op, form, dtype = running[future]
            status, message = future.result()
            row = rows.setdefault((op, form), {"op": op, "form": form, "checks": 0, "alarms": 0})
            row["checks"] += 1
            if status != "pass":
                row["alarms"] += 1
                click.echo(f"{op}/{form} {dtype}: {message}")
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
