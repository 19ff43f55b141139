"""The command ``python -m benchmarks.architectures``."""

from __future__ import annotations

import fnmatch
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from memfix.provenance import installed_version

from ..peers import not_installed
from ..predicted_rows import Row, in_words, kept_rows, write_rows
from .packages import PACKAGES
from .workers import rows


@click.command()
@click.option(
    "--package", "packages", type=click.Choice(list(PACKAGES)), multiple=True,
    help="Whose architectures; may be repeated.  [default: all that are installed]",
)  # fmt: skip
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path),
    help="Write the figures there; with several packages, to one file each, with the package's name added.",
)  # fmt: skip
@click.option("--only", default="*", help="Only architectures whose names match, such as '*: llama*'.")
@click.option("--workers", type=click.IntRange(1), help="Processes at a time.  [default: one a core]")
def main(packages: Sequence[str], json_path: Path | None, only: str, workers: int | None) -> None:
    chosen = list(packages) or [name for name, each in PACKAGES.items() if not_installed((each.module,)) is None]
    absent = not_installed([PACKAGES[name].module for name in chosen or PACKAGES])
    if absent is not None:
        raise click.UsageError(absent)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "DIFFUSERS_VERBOSITY": "error"}
    every = {}
    for name in chosen:
        try:
            every[name] = PACKAGES[name].architectures()
        except Exception as error:  # a package may lack what it needs
            click.echo(f"{name} is left out: {' '.join(f'{type(error).__name__}: {error}'.split())}")
    jobs = {
        (package, name): (package, *of_package[name])
        for package, of_package in every.items()
        for name in of_package
        if fnmatch.fnmatchcase(name, only)
    }
    if not jobs:
        names = [name for of_package in every.values() for name in of_package]
        example = f", such as {names[0]!r}" if names else ""
        raise click.UsageError(f"--only {only!r} matches none of {len(names)} architectures{example}")
    found: dict[str, dict[str, Row]] = {name: {} for name in chosen}
    for (package, name), row in zip(jobs, rows([*jobs.values()], workers or os.cpu_count() or 1), strict=True):
        found[package][name] = row
        click.echo(f"{name}: " + (f"left out: {row['left_out']}" if "left_out" in row else in_words(row)))
        if json_path is not None:
            path = json_path if len(chosen) == 1 else json_path.with_stem(f"{json_path.stem}_{package}")
            _write(path, package, found[package], [*every[package]])


def _write(path: Path, package: str, found: dict[str, Row], every: Sequence[str]) -> None:
    """Write the rows of a package so far. Rows of earlier runs stay until they are made again."""
    before = kept_rows(path if path.exists() else None)["workloads"]
    kept = {name: found.get(name, before.get(name)) for name in every if name in found or name in before}
    write_rows(path, kept, {"measured_on": {package: installed_version(package)}})


if __name__ == "__main__":
    sys.exit(main())
