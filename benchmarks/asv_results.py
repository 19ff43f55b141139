"""Reads and completes the folder of ASV's results, and tells how the list of benchmarks changed between commits."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memfix.atomic_write import write_whole
from memfix.errors import MemfixError

Listing = dict[str, Any]
"""ASV's ``benchmarks.json``: a description of each benchmark by name, beside ASV's own ``version``."""


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MemfixError(f"cannot read {path}: {error}; restore it from git, or delete it") from None
    if not isinstance(data, dict):
        raise MemfixError(f"cannot read {path}: it is no JSON object; restore it from git, or delete it")
    return data


def result_files(results: Path) -> list[Path]:
    return sorted(path for path in results.glob("*/*.json") if path.name != "machine.json")


def require_whole(results: Path) -> None:
    """Refuse a folder with a file that cannot be read: ASV would silently leave it out of the pages."""
    for path in (*results.glob("*.json"), *results.glob("*/*.json")):
        data = read_json(path)
        if path in result_files(results) and not {"commit_hash", "results", "params"} <= data.keys():
            raise MemfixError(f"{path} is no result file of ASV; restore it from git, or delete it")


def listing_of(results: Path) -> Listing:
    path = results / "benchmarks.json"
    return read_json(path) if path.exists() else {}


def benchmarks_in(listing: Listing) -> dict[str, Mapping[str, Any]]:
    return {name: entry for name, entry in listing.items() if isinstance(entry, dict)}


@dataclass(frozen=True)
class Drift:
    """Benchmarks that a later list no longer has, and those that it measures at another shape."""

    gone: tuple[str, ...]
    changed: tuple[str, ...]

    @staticmethod
    def between(earlier: Listing, later: Listing) -> Drift:
        old, new = benchmarks_in(earlier), benchmarks_in(later)
        return Drift(
            tuple(name for name in old if name not in new),
            tuple(name for name in old if name in new and old[name].get("version") != new[name].get("version")),
        )

    def lines(self, where: str) -> list[str]:
        lines = []
        if self.gone:
            lines.append(f"renamed or removed at {where}, shown as far as it was measured: {named(self.gone)}")
        if self.changed:
            lines.append(f"another shape or other inputs at {where}, so a new history: {named(self.changed)}")
        return lines


def named(names: Iterable[str]) -> str:
    """Benchmarks by their class: ``RopeNaiveSmall (4), ...``."""
    counts = Counter(name.removeprefix("ops.").rpartition(".")[0] for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def keep_gone_benchmarks(results: Path, earlier: Listing) -> None:
    """Benchmarks of earlier lists that still have results stay listed, or ASV's pages would drop them silently."""
    listing, has_results = listing_of(results), measured(results)
    kept = {name: e for name, e in benchmarks_in(earlier).items() if name not in listing and name in has_results}
    if kept:
        text = json.dumps({**listing, **kept}, indent=4, sort_keys=True) + "\n"
        write_whole(results / "benchmarks.json", text, "ASV's list of benchmarks")


def measured(results: Path) -> set[str]:
    """Benchmarks that have results, at whatever commit."""
    return {name for path in result_files(results) for name in read_json(path)["results"]}


def unlisted(results: Path) -> list[str]:
    """Benchmarks that have results and that the pages will not show."""
    return sorted(measured(results) - benchmarks_in(listing_of(results)).keys())


def file_under_versions(path: Path, python: str, torch: str, readiness: Mapping[str, Any] | None = None) -> Path:
    """Give a result file of an existing interpreter a name that holds its version, not its path on this machine.

    What was measured of the same commit before and is not measured now stays. ``readiness`` goes into the file.
    """
    data = read_json(path)
    if readiness is not None:
        data["readiness"] = dict(readiness)
    environment = f"py{python}-torch{re.sub(r'[^0-9.].*', '', torch)}"
    data["env_name"], data["python"], data["params"]["python"] = environment, python, python
    target = path.with_name(f"{data['commit_hash'][:8]}-{environment}.json")
    if target.exists() and target != path:
        before = read_json(target)
        if before.get("result_columns") == data.get("result_columns"):
            data["results"] = {**before["results"], **data["results"]}
    write_whole(target, json.dumps(data) + "\n", "ASV's results")
    if target != path:
        path.unlink()
    return target


@dataclass(frozen=True)
class Outcome:
    """How many benchmarks of one result file have a figure, are n/a here, and raised."""

    measured: int
    not_here: int
    raised: tuple[str, ...]

    @staticmethod
    def of(path: Path, names: Iterable[str]) -> Outcome:
        """Of the benchmarks called ``names``, as far as the file has them."""
        results = read_json(path)["results"]
        # a list of one value, which is null where the benchmark raised, NaN where it is n/a
        values = {name: (results[name][0] or [None])[0] for name in names if name in results}
        raised = tuple(name for name, value in values.items() if value is None)
        not_here = sum(1 for value in values.values() if value is not None and value != value)
        return Outcome(len(values) - len(raised) - not_here, not_here, raised)
