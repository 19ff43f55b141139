"""Predicts the peaks of third-party code with the simulated meter, and measures them on a GPU.

    python -m benchmarks.third_party [--json PATH] [--measured PATH] [--only GLOB] [--workers 2]

A package that is not installed is skipped with a message. A step that fails is kept with its error.
Subjects run in parallel, each in its own process; with one worker, all in this process.
"""

from __future__ import annotations

import fnmatch
import multiprocessing
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from memfix.checks.children import start_worker

from ..predicted_rows import in_words, kept_rows, take_measured, write_rows
from . import SUBJECTS, WORKLOADS, missing
from .measuring import rows_of


@click.command()
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the figures there.")
@click.option("--only", default="*", help="Only steps whose names match, such as 'timm *'.")
@click.option("--measured", type=click.Path(exists=True, path_type=Path), help="Take a GPU's bytes from these figures.")
@click.option("--workers", type=click.IntRange(1), help="Processes at a time.  [default: one a core]")
def main(json_path: Path | None, only: str, measured: Path | None, workers: int | None) -> None:
    kept = kept_rows(measured)
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
            take_measured(row, kept, name)
            click.echo(f"{name}: {in_words(row)}")
            for note in row.get("notes", []):
                click.echo(f"  note: {note}")
    if json_path is not None:
        write_rows(json_path, {name: found[name] for name in WORKLOADS if name in found}, kept)


def _of_subjects(chosen: Mapping[str, Sequence[str]], workers: int) -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the rows of each subject as it completes."""
    if workers == 1:
        yield from map(rows_of, chosen, chosen.values())
        return
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(
        workers, spawn, initializer=start_worker, initargs=(workers,), max_tasks_per_child=1
    ) as pool:
        waiting = [pool.submit(rows_of, subject, names) for subject, names in chosen.items()]
        yield from (ready.result() for ready in as_completed(waiting))


if __name__ == "__main__":
    sys.exit(main())
