"""``memfix calibrate``: where the rules stand on a GPU, and what a run on one says and writes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Ended

from memfix.calibration import run
from memfix.calibration.observe import Observation
from memfix.calibration.run import Calibration
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.tables import Standing, Table, read_table

SURROUNDINGS = {"torch": "2.11.0", "cuda": "13.0", "cudnn": "91300", "driver": "580.1", "date": "2025-01-02T03:04:05Z"}
TABLE = Table(
    H200,
    SURROUNDINGS,
    {
        "aten.sort": Standing(10, unknown=1),
        "aten.mm": Standing(4, missed=2),
        "aten.bmm": Standing(2, unknown=2),
    },
    {"aten.bmm.default(float32[1])": 512},
)


@pytest.fixture
def measured_h200(own_tables: Path) -> Path:
    path = own_tables / "h200.json"
    path.write_text(TABLE.as_text())
    return path


# ---------------------------------------------------------------- where the rules stand
@pytest.mark.usefixtures("measured_h200")
def test_each_rule_says_whether_it_was_measured(memfix: Any) -> None:
    ended = memfix("calibrate")
    assert (ended.exit_code, ended.err) == (0, "")
    title, *rows, measured, counts = ended.out.splitlines()
    assert title == (
        "H200: measured with torch 2.11.0, cuda 13.0, cudnn 91300, driver 580.1, date 2025-01-02T03:04:05Z"
    )
    standings = dict(row.split(maxsplit=1) for row in rows)
    assert standings["sort"] == "calibrated, 9 calls"
    assert standings["mm"] == "missed 2 of 4 calls"
    assert standings["bmm"] == "assumed"
    assert standings["topk"] == "assumed"
    assert measured == "  stored as measured: 1 calls without a rule and 0 convolutions of cuDNN"
    assert counts == f"1 calibrated, 1 missed, {len(rows) - 2} assumed"


@pytest.mark.usefixtures("measured_h200")
def test_json_on_standard_output_leaves_the_list_to_standard_error(memfix: Any) -> None:
    ended = memfix("calibrate", "--json", "-")
    assert ended.exit_code == 0
    assert ended.err.startswith("H200: measured with torch 2.11.0")
    data = json.loads(ended.out)
    assert data["gpu"] == "H200"
    assert (data["rules"]["sort"], data["rules"]["mm"]) == ("calibrated, 9 calls", "missed 2 of 4 calls")


@pytest.mark.usefixtures("own_tables")
def test_a_gpu_that_nobody_measured_is_called_so(memfix: Any) -> None:
    ended = memfix("calibrate", "--gpu", "A100", "--json", "rules.json")
    assert (ended.exit_code, ended.err) == (0, "")
    rules = json.loads(Path("rules.json").read_text())["rules"]
    assert set(rules.values()) == {"assumed"}
    assert ended.out.splitlines() == [
        "A100: never measured; every rule is assumed, and readings are estimates",
        "run memfix calibrate --run on a machine that has one",
        f"0 calibrated, 0 missed, {len(rules)} assumed",
    ]


@pytest.mark.usefixtures("own_tables")
def test_the_table_that_memfix_brings_for_the_h200_is_shown(memfix: Any) -> None:
    ended = memfix("calibrate", "--json", "-")
    assert ended.exit_code == 0
    assert ended.err.startswith(("H200: measured with torch ", "H200: never measured"))
    assert len(json.loads(ended.out)["rules"]) > 100


def test_a_broken_table_ends_with_2_and_its_name(memfix: Any, measured_h200: Path) -> None:
    measured_h200.write_text("{")
    ended = memfix("calibrate")
    assert (ended.exit_code, ended.out) == (2, "")
    assert ended.err.startswith(f"memfix: {measured_h200}: not a table of memfix calibrate (")


def test_a_table_without_some_of_its_surroundings_is_shown(memfix: Any, measured_h200: Path) -> None:
    measured_h200.write_text(Table(H200, {"torch": "2.11.0"}).as_text())
    ended = memfix("calibrate")
    assert ended.exit_code == 0
    assert ended.out.startswith("H200: measured with torch 2.11.0, cuda unknown, cudnn unknown, driver unknown, ")


# ---------------------------------------------------------------- refusals
@pytest.mark.parametrize("option", ["--only", "--step", "--out"])
def test_an_option_of_a_run_without_a_run_is_refused(memfix: Any, option: str) -> None:
    ended = memfix("calibrate", option, "sort")
    assert (ended.exit_code, ended.out) == (4, "")
    assert "Error: --only, --step and --out belong to --run" in ended.err


def test_an_unknown_gpu_ends_with_4_and_the_nearest_one(memfix: Any) -> None:
    assert memfix("calibrate", "--gpu", "A10") == Ended(4, "", "memfix: unknown GPU 'A10'; did you mean 'A100'?\n")


def test_a_report_that_cannot_be_written_is_refused(memfix: Any, tmp_path: Path) -> None:
    assert memfix("calibrate", "--json", "missing/rules.json") == Ended(
        4, "", f"memfix: cannot write the report missing/rules.json: no folder {tmp_path / 'missing'}\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_run_without_a_gpu_ends_with_2(memfix: Any) -> None:
    assert memfix("calibrate", "--run", "--only", "sort") == Ended(
        2, "", "memfix: calibrating needs a GPU, and torch sees none; without --run the known tables are shown\n"
    )


def test_a_choice_that_no_probe_is_in_ends_with_4(memfix: Any) -> None:
    assert memfix("calibrate", "--run", "--only", "no such probe") == Ended(
        4, "", "memfix: --only: no probe's name contains 'no such probe'\n"
    )


def test_a_step_that_is_not_there_ends_with_4(memfix: Any) -> None:
    assert memfix("calibrate", "--run", "--step", "train.py:build") == Ended(
        4, "", "memfix: --step: there is no file train.py\n"
    )


# ---------------------------------------------------------------- a run
AS_PREDICTED = Observation("aten.mm", "mm(1)", 64, 64, 8, 8)
WRONG = Observation("aten.mm", "mm(2)", 1024, 0, 16, 8)
NO_RULE = Observation("aten.stft", "stft(1)", 512, None, 8, 8, "no workspace rule for stft")
NO_RULE_AND_KEEPS_MORE = Observation("aten.stft", "stft(2)", 0, None, 9, 8, "no workspace rule for stft")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch, own_tables: Path) -> Any:
    """``found(...)``: what a run on a GPU would have seen."""

    def found(*observations: Observation, failures: Mapping[str, str] | None = None) -> None:
        table = run._tabulated(H200, SURROUNDINGS, observations)
        monkeypatch.setattr(run, "calibrate", lambda *_: Calibration(table, observations, failures or {}))

    return found


def test_a_run_writes_the_users_own_table(memfix: Any, found: Any, own_tables: Path) -> None:
    found(AS_PREDICTED, NO_RULE)
    ended = memfix("calibrate", "--run")
    path = own_tables / "h200.json"
    assert ended == Ended(
        0,
        f"H200: 2 calls of 2 operators: 1 agree with their rule, 0 missed, 1 without a rule\nwrote {path}\n",
        "",
    )
    table = read_table(path)
    assert (table.operators["aten.mm"], table.measured) == (Standing(1), {"stft(1)": 512})
    assert path.read_text() == table.as_text()


STEP = """
import torch

def build(device):
    layer, x = torch.nn.Conv2d(3, 8, 3, device=device), torch.randn(5, 3, 9, 9, device=device)
    return lambda: layer(x).sum().backward()
"""


def test_the_convolutions_of_a_step_are_measured_and_kept_beside_the_others(
    memfix: Any, monkeypatch: pytest.MonkeyPatch, own_tables: Path, tmp_path: Path
) -> None:
    (tmp_path / "own_train.py").write_text(STEP)
    measured: list[str] = []

    def calibrated(probes: Any, convolutions: Any, say: Any) -> Calibration:
        assert not probes
        measured.extend(convolution.spelled for convolution in convolutions)
        return Calibration(Table(H200, {"cudnn": "91900"}, convolutions=dict.fromkeys(measured, 7)), (), {})

    monkeypatch.setattr(run, "calibrate", calibrated)
    ended = memfix("calibrate", "--run", "--step", "own_train.py:build")
    assert (ended.exit_code, ended.err) == (0, "")
    assert measured == ["forward float32 5,3,9,9 8,3,3,3", "weight float32 5,3,9,9 8,3,3,3"]
    assert "2 convolutions of cuDNN stored as measured" in ended.out.splitlines()
    kept = read_table(own_tables / "h200.json").convolutions
    assert kept[measured[0]] == kept[measured[1]] == 7
    assert len(kept) > 10_000


def test_a_miss_ends_with_1_and_is_printed(memfix: Any, found: Any, tmp_path: Path) -> None:
    found(AS_PREDICTED, WRONG, failures={"sort_rows[rows=1]": "RuntimeError: no"})
    ended = memfix("calibrate", "--run", "--out", "tables/mine.json")
    assert ended.exit_code == 1
    assert ended.out.splitlines() == [
        "missed: takes 1,024 bytes of workspace (its rule says 0), keeps 16 (expected 8)  mm(2)",
        "did not run: sort_rows[rows=1]: RuntimeError: no",
        "H200: 2 calls of 1 operators: 1 agree with their rule, 1 missed, 0 without a rule",
        "wrote tables/mine.json",
    ]
    assert read_table(tmp_path / "tables/mine.json").operators == {"aten.mm": Standing(2, missed=1)}


def test_a_call_that_is_missed_and_has_no_rule_is_counted_once(memfix: Any, found: Any, own_tables: Path) -> None:
    found(AS_PREDICTED, NO_RULE_AND_KEEPS_MORE)
    ended = memfix("calibrate", "--run", "--only", "sort")
    assert ended.exit_code == 1
    assert ended.out.splitlines() == [
        "missed: takes 0 bytes of workspace (no rule), keeps 9 (expected 8)  stft(2)",
        "H200: 2 calls of 2 operators: 1 agree with their rule, 1 missed, 0 without a rule",
        f"wrote {own_tables / 'h200.json'}",
    ]


def test_a_run_of_some_probes_updates_the_table(memfix: Any, found: Any, measured_h200: Path) -> None:
    found(AS_PREDICTED, NO_RULE)
    assert memfix("calibrate", "--run", "--only", "sort", "--only", "stft").exit_code == 0
    table = read_table(measured_h200)
    assert table.operators == {
        "aten.bmm": Standing(2, unknown=2),
        "aten.mm": Standing(1),  # it had missed, so this run alone speaks for it
        "aten.sort": Standing(10, unknown=1),
        "aten.stft": Standing(1, unknown=1),
    }
    assert table.measured == {"aten.bmm.default(float32[1])": 512, "stft(1)": 512}


def test_a_table_that_cannot_be_written_ends_with_4(memfix: Any, found: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found(AS_PREDICTED)
    ended = memfix("calibrate", "--run", "--out", "file/h200.json")
    assert (ended.exit_code, ended.err) == (4, "memfix: cannot write the table file/h200.json: File exists\n")


def test_the_report_of_a_run_has_every_call(memfix: Any, found: Any) -> None:
    found(AS_PREDICTED, WRONG, failures={"probe": "RuntimeError: no"})
    ended = memfix("calibrate", "--run", "--only", "sort", "--json", "-")
    data = json.loads(ended.out)
    assert [(row["signature"], row["measured"], row["missed"]) for row in data["observations"]] == [
        ("mm(1)", 64, False),
        ("mm(2)", 1024, True),
    ]
    assert data["failures"] == {"probe": "RuntimeError: no"}
