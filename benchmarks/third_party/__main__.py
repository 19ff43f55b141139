"""Predicts the peaks of other people's code with the simulated meter, and on a GPU measures them beside it.

    python -m benchmarks.third_party [--json PATH] [--measured PATH] [--only GLOB] [--workers 2]

A package that is not installed is left out, with a line that says so. A step that fails is kept with its error.
Subjects run side by side, each in a process of its own; with one worker, all in this one.
"""

from __future__ import annotations

import fnmatch
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from memfix.atomic_write import write_whole
from memfix.checks.children import start_worker
from memfix.provenance import describe
from memfix.units import format_bytes

from . import SUBJECTS, WORKLOADS, missing
from .measuring import rows_of


def in_words(row: dict[str, Any]) -> str:
    real = f", measured {row['measured']:,}" if "measured" in row else ""
    real += f", on the GPU {row['error_on_gpu']}" if "error_on_gpu" in row else ""
    if "error" in row:
        return row["error"] + real
    kind = "exact" if row["exact"] else "an estimate"
    if "at_most" in row:
        kind += f" between {row['at_least']:,} and {row['at_most']:,}"
    return f"predicted {row['predicted']:,} bytes ({format_bytes(row['predicted'])}, {kind}){real}; {row['cpu_s']} s"


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--only", default="*", help="Only steps whose names match, such as 'timm *'.")
@click.option("--measured", type=click.Path(exists=True, path_type=Path), help="Take a GPU's bytes from these figures.")
@click.option("--workers", type=click.IntRange(1), help="Processes at a time.  [default: one a core]")
def main(json_path: Path | None, only: str, measured: Path | None, workers: int | None) -> None:
    kept = json.loads(measured.read_text()) if measured else {"workloads": {}}
    chosen: dict[str, list[str]] = {}
    for subject, steps in SUBJECTS.items():
        for name, (package, _) in steps.items():
            if fnmatch.fnmatchcase(name, only):
                reason = missing(package)
                chosen.setdefault(subject, []).extend([name] if reason is None else [])
                if reason is not None:
                    click.echo(f"{name}: left out: {reason}")
    if not chosen:
        example = next(iter(WORKLOADS))
        raise click.UsageError(f"--only {only!r} matches none of {len(WORKLOADS)} steps, such as {example!r}")
    found: dict[str, Any] = {}
    for rows in _of_subjects(chosen, min(workers or os.cpu_count() or 1, len(chosen))):
        found |= rows
        for name, row in rows.items():
            if "measured" in (before := kept["workloads"].get(name, {})):
                row["measured"] = before["measured"]
            click.echo(f"{name}: {in_words(row)}")
            for note in row.get("notes", []):
                click.echo(f"  note: {note}")
    if json_path is not None:
        data = {
            "surroundings": describe(),
            "measured_on": kept.get("measured_on") or kept.get("surroundings"),
            "workloads": {name: found[name] for name in WORKLOADS if name in found},
        }
        write_whole(json_path, json.dumps(data, indent=1) + "\n", "the figures")


def _of_subjects(chosen: Mapping[str, Sequence[str]], workers: int) -> Iterator[dict[str, dict[str, Any]]]:
    """The rows of each subject, as they are ready."""
    if workers == 1:
        yield from map(rows_of, chosen, chosen.values())
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=start_worker, max_tasks_per_child=1) as pool:
        waiting = [pool.submit(rows_of, subject, names, workers) for subject, names in chosen.items()]
        yield from (ready.result() for ready in as_completed(waiting))


if __name__ == "__main__":
    sys.exit(main())
