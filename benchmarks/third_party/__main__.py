"""Predicts the peaks of other people's code with the simulated meter, and on a GPU measures them beside it.

    python -m benchmarks.third_party [--json PATH] [--only GLOB]

A package that is not installed is left out, with a line that says so. A step that fails is kept with its error.
"""

from __future__ import annotations

import fnmatch
import json
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch

import memfix
from memfix.atomic_write import write_whole
from memfix.meters.base import StepBuilder
from memfix.provenance import describe, installed_version
from memfix.units import format_bytes

from . import WORKLOADS, missing

_DISTRIBUTION = {"liger_kernel": "liger-kernel", "fla": "flash-linear-attention"}


def measured(build: StepBuilder) -> dict[str, Any]:
    """What is predicted, with its bounds and the CPU time that it took, or why it is not; and what a GPU takes."""
    row: dict[str, Any] = {}
    start = time.process_time()
    try:
        predicted = memfix.peak(build)
    except Exception as error:  # other people's code may raise anything
        row["error"] = f"{type(error).__name__}: {error}"
    else:
        row |= {"predicted": predicted.peak_bytes, "exact": predicted.exact, "notes": list(predicted.notes)}
        if predicted.at_most is not None:
            row |= {"at_least": predicted.at_least, "at_most": predicted.at_most}
    row["cpu_s"] = round(time.process_time() - start, 1)
    if torch.cuda.is_available():
        try:
            row["measured"] = memfix.peak(build, meter="cuda").peak_bytes
        except Exception as error:
            row["error_on_gpu"] = f"{type(error).__name__}: {error}"
    return row


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
def main(json_path: Path | None, only: str) -> None:
    rows: dict[str, Any] = {}
    data = {"surroundings": describe(), "workloads": rows}
    chosen = {name: step for name, step in WORKLOADS.items() if fnmatch.fnmatchcase(name, only)}
    if not chosen:
        example = next(iter(WORKLOADS))
        raise click.UsageError(f"--only {only!r} matches none of {len(WORKLOADS)} steps, such as {example!r}")
    for name, (package, build) in chosen.items():
        reason = missing(package)
        if reason is not None:
            click.echo(f"{name}: left out: {reason}")
            continue
        row = rows[name] = {"package": package, "version": installed_version(_DISTRIBUTION.get(package, package))}
        row |= measured(build)
        click.echo(f"{name}: {in_words(row)}")
        for note in row.get("notes", []):
            click.echo(f"  note: {note}")
        if json_path is not None:  # after each, since the next may be long
            write_whole(json_path, json.dumps(data, indent=1) + "\n", "the figures")


if __name__ == "__main__":
    sys.exit(main())
