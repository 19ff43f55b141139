"""The benchmark of one rank of many: every way to spread a model is predicted, and on a GPU measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import memfix
from benchmarks.ranks import STEPS, main

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/ranks.json"
KEPT = json.loads(RESULTS.read_text())["workloads"] if RESULTS.exists() else {}


def predicted(name: str) -> memfix.Reading:
    mesh, build = STEPS[name]
    return memfix.peak(build, mesh=mesh)


@pytest.mark.parametrize("name", STEPS)
def test_a_rank_is_predicted(name: str) -> None:
    reading = predicted(name)
    assert reading.peak_bytes > 2**20
    assert reading.exact or reading.notes


@pytest.mark.parametrize("name", [name for name, row in KEPT.items() if "measured" in row])
def test_a_rank_takes_what_an_h200_measured(name: str) -> None:
    reading = predicted(name)
    off = reading.peak_bytes - KEPT[name]["measured"]
    assert off == 0 if reading.exact else abs(off) <= 0.05 * KEPT[name]["measured"]


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_rank_takes_on_this_gpu_what_is_predicted(name: str) -> None:
    mesh, build = STEPS[name]
    reading, measured = predicted(name), memfix.peak(build, mesh=mesh, meter="cuda")
    off = reading.peak_bytes - measured.peak_bytes
    assert off == 0 if reading.exact else abs(off) <= 0.05 * measured.peak_bytes


def test_kept_parameters_are_alive_at_the_peak() -> None:
    kept, gathered_again = (predicted(f"FSDP2, bfloat16, {how} after forward") for how in ("kept", "resharded"))
    assert kept.base_bytes == gathered_again.base_bytes
    assert kept.peak_bytes > gathered_again.peak_bytes


def test_figures_are_told_and_written_with_the_bytes_of_an_earlier_run(tmp_path: Path) -> None:
    def run(*arguments: Any) -> str:
        result = CliRunner().invoke(main, ["--only", "experts *", *map(str, arguments)])
        assert result.exit_code == 0, result.output
        return result.output

    path = tmp_path / "ranks.json"
    assert "experts spread over the ranks, rank 0 of {'expert': 8}: predicted " in run("--json", path)
    figures = json.loads(path.read_text())
    row = figures["workloads"]["experts spread over the ranks"]
    row["measured"] = row["predicted"] + 512
    path.write_text(json.dumps(figures))
    assert "; off by -512 bytes" in run("--measured", path)


def test_only_that_matches_nothing_is_refused() -> None:
    result = CliRunner().invoke(main, ["--only", "FSDP1*"])
    assert result.exit_code == 2
    assert f"--only 'FSDP1*' matches none of {len(STEPS)} steps, such as 'FSDP2, bfloat16" in result.output
