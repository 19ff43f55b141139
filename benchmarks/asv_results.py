"""The folder of ASV's results: reading, completing, and changes of its list of benchmarks between commits."""

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
    """Refuse a folder with an unreadable file: ASV would silently omit it from the pages."""
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
    """The difference of two lists: benchmarks that the later one lacks, and those that it measures at other inputs."""

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
    """Return the number of benchmarks of each class, in words: ``RopeNaiveSmall (4), ...``."""
    counts = Counter(name.removeprefix("ops.").rpartition(".")[0] for name in names)
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def keep_gone_benchmarks(results: Path, earlier: Listing) -> None:
    """Add removed benchmarks that still have results to the list: ASV's pages would silently drop them."""
    listing, has_results = listing_of(results), measured(results)
    kept = {name: e for name, e in benchmarks_in(earlier).items() if name not in listing and name in has_results}
    if kept:
        text = json.dumps({**listing, **kept}, indent=4, sort_keys=True) + "\n"
        write_whole(results / "benchmarks.json", text, "ASV's list of benchmarks")


def measured(results: Path) -> set[str]:
    """Return the benchmarks that have results at any commit."""
    return {name for path in result_files(results) for name in read_json(path)["results"]}


def unlisted(results: Path) -> list[str]:
    """Return the benchmarks that have results but will not be on the pages."""
    return sorted(measured(results) - benchmarks_in(listing_of(results)).keys())


def file_under_versions(path: Path, python: str, torch: str, readiness: Mapping[str, Any] | None = None) -> Path:
    """Rename a result file of an existing interpreter after its versions, not its path on this machine.

    Keeps earlier results of the same commit that were not measured again. Adds ``readiness`` to the file.
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
    """The benchmarks of one result file: how many have a figure, how many are n/a here, and which raised."""

    measured: int
    not_here: int
    raised: tuple[str, ...]

    @staticmethod
    def of(path: Path, names: Iterable[str]) -> Outcome:
        """Count the benchmarks called ``names`` that are in the file."""
        results = read_json(path)["results"]
        # a result is a list of one value: null if the benchmark raised, NaN if it is n/a
        values = {name: (results[name][0] or [None])[0] for name in names if name in results}
        raised = tuple(name for name, value in values.items() if value is None)
        not_here = sum(1 for value in values.values() if value is not None and value != value)
        return Outcome(len(values) - len(raised) - not_here, not_here, raised)
