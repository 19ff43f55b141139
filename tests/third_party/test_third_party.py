"""Unmodified code of other packages under the simulated meter, where they are installed."""

from __future__ import annotations

import fnmatch
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import memfix
from benchmarks.predicted_rows import in_words
from benchmarks.third_party import SUBJECTS, WORKLOADS, missing
from benchmarks.third_party.__main__ import main

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/third_party.json"
KEPT = {name: row for name, row in json.loads(RESULTS.read_text())["workloads"].items() if "measured" in row}


def build_of(name: str):
    package, build = WORKLOADS[name]
    reason = missing(package)
    if reason is not None:
        pytest.skip(reason)
    return build


def test_there_are_enough_steps_of_enough_packages() -> None:
    assert len(WORKLOADS) >= 64
    assert len({package for package, _ in WORKLOADS.values()}) >= 7


@pytest.mark.parametrize("name", WORKLOADS)
def test_other_peoples_code_runs_unmodified(name: str) -> None:
    reading = memfix.peak(build_of(name))
    assert reading.peak_bytes > 2**18
    assert reading.exact or reading.notes


@pytest.mark.parametrize("name", KEPT)
def test_other_peoples_code_takes_what_an_h200_measured(name: str) -> None:
    predicted, measured = memfix.peak(build_of(name)), KEPT[name]["measured"]
    if predicted.exact:
        assert predicted.peak_bytes == measured
    elif predicted.at_most is None or not predicted.at_least <= measured <= predicted.at_most:
        assert predicted.peak_bytes == pytest.approx(measured, rel=0.05)


def test_a_step_whose_package_is_missing_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUBJECTS["language"], "a step", ("no_such_package", lambda device: lambda: None))
    result = CliRunner().invoke(main, ["--only", "a step"])
    assert result.exit_code == 0
    assert result.output == "a step: left out: no_such_package not installed\n"


def test_a_step_that_fails_is_told_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: str) -> None:
        raise KeyError("no such layer")

    def runs(device: str):
        return lambda: torch.empty(1000, device=device)

    for name, build in (("one that fails", fails), ("one that runs", runs)):
        monkeypatch.setitem(SUBJECTS["language"], name, ("torch", build))
    result = CliRunner().invoke(main, ["--only", "one that *", "--workers", "1"])
    assert result.exit_code == 0, result.output
    assert "one that fails: KeyError: 'no such layer'" in result.output
    assert "one that runs: predicted 4,000 bytes (3.91 KiB, exact)" in result.output


def test_a_step_that_fails_on_the_gpu_alone_keeps_its_prediction() -> None:
    row = {"predicted": 4096, "exact": True, "cpu_s": 0.5, "error_on_gpu": "KeyError: 'no such layer'"}
    words = "predicted 4,096 bytes (4.00 KiB, exact), on the GPU KeyError: 'no such layer'; 0.5 s"
    assert in_words(row) == words


def test_only_that_matches_nothing_is_refused() -> None:
    result = CliRunner().invoke(main, ["--only", "tim *"])
    assert result.exit_code == 2
    assert f"--only 'tim *' matches none of {len(WORKLOADS)} steps, such as 'Qwen3, train step'" in result.output


def test_an_estimate_is_told_with_its_bounds() -> None:
    row = {"predicted": 4096, "exact": False, "at_least": 1024, "at_most": 8192, "cpu_s": 0.5, "measured": 4608}
    words = "predicted 4,096 bytes (4.00 KiB, an estimate between 1,024 and 8,192), measured 4,608; 0.5 s"
    assert in_words(row) == words


# ---------------------------------------------------------------- as users write them
def peak_of(name: str) -> memfix.Reading:
    return memfix.peak(build_of(name))


@pytest.mark.parametrize("name", ["Llama, attention mask", "Llama, padded batch"])
def test_an_attention_mask_is_known(name: str) -> None:
    reading = peak_of(name)
    assert reading.exact, reading.notes
    assert not any("mask" in note for note in reading.notes)


def test_a_constructor_of_timm_reads_its_own_numbers() -> None:
    reading = peak_of("timm ConvNeXt atto")
    assert all(fnmatch.fnmatch(note, "convolution of *") or "training.py" in note for note in reading.notes)


def test_a_data_loader_gives_real_batches() -> None:
    assert not any("copies values" in note for note in peak_of("torch_geometric GIN, loader of graphs").notes)


@pytest.mark.parametrize("name", ["Lightning Trainer", "transformers Trainer"])
def test_a_trainer_runs_its_own_loop(name: str) -> None:
    reading = peak_of(name)
    assert reading.exact, reading.notes
