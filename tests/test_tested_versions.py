"""The versions that memfix says it was tested with are those that it has results of."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.tables import read_table
from memfix.versions import NEWEST_TORCH, OLDEST_TORCH, major_and_minor, torch_range, untested_torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = [json.loads(path.read_text()) for path in (ROOT / "benchmarks/results/versions").glob("*.json")]


def test_every_version_in_the_range_was_tested_or_measured_on_a_gpu() -> None:
    table = read_table(ROOT / f"memfix/meters/simulated/tables/{H200.name.lower()}.json")
    shown = {major_and_minor(found["torch"]) for found in RESULTS} | {major_and_minor(table.surroundings["torch"])}
    major, oldest, newest = OLDEST_TORCH[0], OLDEST_TORCH[1], NEWEST_TORCH[1]
    assert {(major, minor) for minor in range(oldest, newest + 1)} <= shown


def test_no_test_failed_where_results_were_kept() -> None:
    assert RESULTS
    assert {name for found in RESULTS for name in found["failures"]} == set()
    assert all(found["passed"] > 900 for found in RESULTS)


def test_a_users_torch_is_not_taken_back() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (torch,) = [package for package in project["dependencies"] if package.startswith("torch")]
    assert torch == f"torch>={OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}"
    extras = project["optional-dependencies"].values()
    assert not [package for extra in extras for package in extra if package.startswith("numpy<")]


def test_version_outside_of_the_range_is_named_with_those_inside() -> None:
    assert torch_range() == "2.11 to 2.15"
    assert untested_torch("2.12.1+cu130", None) is None
    assert (
        untested_torch("2.16.0", None)
        == "torch 2.16.0 was not tested: the rules follow the kernels of torch 2.11 to 2.15"
    )
    assert untested_torch("2.16.0", "2.16.2") is None


def test_what_is_no_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a version: 'newest'"):
        major_and_minor("newest")
