"""The lock and the stored results that the manual's tables are generated from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / "benchmarks/memory.lock"
RESULTS = ROOT / "benchmarks/results"


def h200(name: str) -> dict[str, Any]:
    return _read(RESULTS / f"h200/{name}.json")


def cpu(name: str) -> dict[str, Any]:
    return _read(RESULTS / f"cpu/{name}.json")


def all_results(pattern: str) -> list[dict[str, Any]]:
    return [_read(path) for path in sorted(RESULTS.glob(pattern))]


def _read(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def gpu_of(data: dict[str, Any], *packages: str) -> str:
    """Return where a result was measured: ``NVIDIA H200 (torch 2.11.0, 2026-11-15)``. torch is named by default."""
    where = data["surroundings"]
    versions = [f"{package} {where[package]}" for package in packages or ("torch",)]
    return f"{where['gpu']} ({', '.join([*versions, where['date'][:10]])})"


def train_rows(entry: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the rows of the train step that ``benchmarks.compare`` measured at one shape."""
    return dict(entry["phases"]["train"]["rows"])
