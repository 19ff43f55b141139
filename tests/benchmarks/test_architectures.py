"""Every architecture of a package: which configuration is tried, what a row says, and what an H200 showed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ci_script import ci_script
from click.testing import CliRunner
from torch import nn

from benchmarks.architectures import __main__ as command
from benchmarks.architectures import one_row, workers
from benchmarks.architectures.__main__ import main
from benchmarks.architectures.package import Package
from benchmarks.architectures.packages import PACKAGES
from benchmarks.architectures.steps import bounded_loss, trained

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200"


class _Config:
    is_encoder_decoder = False

    def __init__(self, hidden_size: int = 2**16, head_dim: int = 64, vocab_size: int = 50_000) -> None:
        if head_dim == 32:
            raise ValueError("heads must be 64 wide")
        self.hidden_size, self.head_dim, self.vocab_size = hidden_size, head_dim, vocab_size

    def get_text_config(self) -> _Config:
        return self


class _Model(nn.Module):
    config_class = _Config

    def __init__(self, config: _Config) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.table(input_ids).pow(2).mean())


class _Broken(_Model):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        raise KeyError("layer_types")


class _Refused(_Model):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(loss=self.table(input_ids).unique().mean())


@pytest.fixture(autouse=True)
def transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    classes = {"Model": _Model, "Broken": _Broken, "Refused": _Refused}
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(**classes))


def test_the_first_small_configuration_that_runs_is_measured() -> None:
    row = one_row.row_of("transformers", "causal language model", "Model")
    assert row["exact"]
    tables = row["predicted"] / (1000 * 128 * 4)  # the gradient and what clipping or AdamW need beside it
    assert 2 <= tables < 3


def test_an_architecture_that_never_runs_is_left_out_with_the_first_reason() -> None:
    row = one_row.row_of("transformers", "masked language model", "Broken")
    assert row["left_out"] == "ValueError: heads must be 64 wide"


def test_a_refused_step_is_no_reason_to_leave_an_architecture_out() -> None:
    row = one_row.row_of("transformers", "causal language model", "Refused")
    assert row["error"].startswith("MeasurementError: the step needs the values of a tensor (aten._unique2.default)")


def test_one_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: _Model, config: _Config) -> None:
        raise one_row.Late("it takes longer than 120 s")

    monkeypatch.setattr(_Model, "__init__", late)
    assert one_row.row_of("transformers", "causal language model", "Model")["left_out"] == "it takes longer than 120 s"


class _Line(nn.Module):
    """Four numbers in, four numbers out, unless it breaks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width > 4:
            raise ValueError("too wide")
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> Any:
        return {"result": (self.weight * x, None), "number": 3}


def _called(model: nn.Module, batch: Any) -> Any:
    return model(batch["x"])


def _small_package() -> Package:
    def attempts(task: str, name: str) -> Any:
        for width in (8, 4):
            yield lambda width=width: trained(lambda: _Line(width), {"x": torch.ones(width)}, _called)

    names = {f"test: {name}": ("test", name) for name in ("Line", "Other")}
    return Package("torch", lambda: names, attempts)


@pytest.fixture
def small_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGES, "timm", _small_package())


def test_the_loss_is_of_all_floats_that_depend_on_the_weights() -> None:
    answer = _Line(4)(torch.tensor([0.0, 0.0, 0.0, 1e6]))
    loss = bounded_loss([answer, torch.ones(3)])
    loss.backward()
    assert loss.item() == 1
    with pytest.raises(TypeError, match="the model returns no floats but a Tensor"):
        bounded_loss(torch.ones(3))


@pytest.mark.usefixtures("small_package")
def test_a_configuration_is_tried_on_the_cpu_and_the_next_one_if_it_fails() -> None:
    row = one_row.row_of("timm", "test", "Line")
    assert (row["exact"], "left_out" in row) == (True, False)


class _FakePipe:
    """The pipe of a process that answers each job as ``answers`` says."""

    def __init__(self, *answers: Any) -> None:
        self.answers, self.num_closed = list(answers), 0

    def send(self, job: Any) -> None: ...

    def poll(self, seconds: float) -> bool:
        return self.answers[0] != "late"

    def recv(self) -> Any:
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.num_closed += 1


@pytest.mark.parametrize(
    ("answer", "error", "is_replaced"),
    [
        ("late", f"it takes longer than {workers.MOST_SECONDS} s", True),
        (EOFError(), "the process ended with exit code -11", True),
        ((False, {"class": "Line"}), None, True),
        ((True, {"class": "Line"}), None, False),
    ],
)
def test_a_process_that_hangs_ends_or_lost_its_gpu_is_replaced(
    answer: Any, error: str | None, is_replaced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = _FakePipe(answer)
    worker = workers._Worker(1)
    monkeypatch.setattr(worker, "_pipe", pipe)
    monkeypatch.setattr(worker, "_process", SimpleNamespace(kill=int, join=int, exitcode=-11))
    row = worker.row(("timm", "test", "Line"))
    assert (row["class"], row.get("error")) == ("Line", error)
    assert (pipe.num_closed, worker._pipe is None) == (is_replaced, is_replaced)


def test_rows_come_in_order_from_processes_of_their_own() -> None:
    jobs = [("transformers", "no task", "NoClass"), ("torchvision", "no task", "no_builder")]
    found = list(workers.rows(jobs, 2))
    assert [row["class"] for row in found] == ["NoClass", "no_builder"]
    assert all("left_out" in row for row in found)


@pytest.mark.usefixtures("small_package")
def test_figures_are_written_for_each_package_and_keep_earlier_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"task": "test", "class": "Line", "predicted": 8, "exact": True, "notes": [], "cpu_s": 0.1}
    monkeypatch.setattr(command, "rows", lambda jobs, num_workers: (row for _ in jobs))
    monkeypatch.setattr(command, "installed_version", lambda distribution: "1.0")
    path = tmp_path / "some.json"
    for only in ("*: Line", "*: Other"):
        result = CliRunner().invoke(main, ["--package", "timm", "--only", only, "--json", str(path)])
        assert (result.exit_code, "predicted 8 bytes" in result.output) == (0, True)
    data = json.loads(path.read_text())
    assert (list(data["workloads"]), data["measured_on"]) == (["test: Line", "test: Other"], {"timm": "1.0"})
    monkeypatch.setitem(PACKAGES, "torchvision", _small_package())
    CliRunner().invoke(main, ["--package", "timm", "--package", "torchvision", "--json", str(path)])
    assert {each.name for each in tmp_path.iterdir()} == {"some.json", "some_timm.json", "some_torchvision.json"}


def test_a_chosen_package_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "not_installed", lambda packages: f"{packages[0]} not installed")
    for arguments in (["--package", "timm"], []):
        result = CliRunner().invoke(main, arguments)
        reason = f"{'timm' if arguments else 'transformers'} not installed"
        assert (result.exit_code, reason in result.output) == (2, True)


@pytest.mark.usefixtures("small_package")
def test_a_package_that_cannot_be_imported_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise ImportError("no module named PIL")

    monkeypatch.setitem(PACKAGES, "diffusers", Package("torch", broken, lambda task, name: ()))
    monkeypatch.setattr(command, "rows", lambda jobs, num_workers: ({"left_out": "tried"} for _ in jobs))
    result = CliRunner().invoke(main, ["--package", "diffusers", "--package", "timm"])
    assert result.exit_code == 0
    assert result.output.splitlines() == [
        "diffusers is left out: ImportError: no module named PIL",
        "test: Line: left out: tried",
        "test: Other: left out: tried",
    ]


@pytest.mark.usefixtures("small_package")
def test_a_pattern_that_matches_nothing_names_an_architecture() -> None:
    result = CliRunner().invoke(main, ["--package", "timm", "--only", "none"])
    assert (result.exit_code, "such as 'test: Line'" in result.output) == (2, True)


def test_packages_have_a_table_once_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ci_script("tables")
    stored, accuracy = sys.modules["manual.stored"], sys.modules["manual.accuracy"]
    monkeypatch.setattr(stored, "RESULTS", tmp_path)
    assert accuracy.packages_table() == []
    where = {"gpu": "NVIDIA H200", "torch": "2.11.0", "driver": "580", "date": "2026-11-19T18:45:38Z"}
    bounds = {"at_least": 5, "at_most": 8}
    rows = {
        "same": {"task": "train", "predicted": 8, "measured": 8, "exact": True},
        "wrong": {"task": "train", "predicted": 8, "measured": 9, "exact": True},
        "near": {"task": "train", "predicted": 8, "measured": 5, "exact": False} | bounds,
        "refused": {"task": "other", "error": "MeasurementError: no", "measured": 9},
        "left out": {"task": "other", "left_out": "too large"},
        "of too much memory": {"task": "other", "predicted": 8, "exact": True, "error_on_gpu": "OutOfMemoryError"},
    }
    (tmp_path / "h200").mkdir()
    data = {"surroundings": where, "measured_on": {"timm": "1.0"}, "workloads": rows}
    (tmp_path / "h200/architectures_timm.json").write_text(json.dumps(data))
    lines = accuracy.packages_table()
    assert lines[0] == (
        "- timm 1.0, NVIDIA H200 (torch 2.11.0, driver 580, 2026-11-19): 2 of 6 do not run in what was tried."
    )
    assert lines[-3:] == [
        "| timm, train | 3 | 1 | 1 | 0 | 1 | 0 |",
        "| timm, other | 1 | 0 | 0 | 0 | 0 | 1 |",
        "| all | 4 | 1 | 1 | 0 | 1 | 1 |",
    ]


OFF_WITHOUT_BOUNDS = {"model: JumpingKnowledge", "pooling: ClusterPooling"}
"""Their readings say that they have no bounds: of an LSTM in cuDNN, and of a count that decides."""


@pytest.mark.parametrize("path", sorted(RESULTS.glob("architectures*.json")), ids=lambda path: path.stem)
def test_no_prediction_was_wrong_on_an_h200(path: Path) -> None:
    every = json.loads(path.read_text())["workloads"]
    rows = {name: row for name, row in every.items() if "predicted" in row and "measured" in row}
    assert len(rows) > (500 if path.stem == "architectures" else 20)
    for name, row in rows.items():
        low, high = row.get("at_least", row["predicted"]), row.get("at_most", row["predicted"])
        assert low <= row["measured"] <= high or (name in OFF_WITHOUT_BOUNDS and "at_least" not in row)
        assert not row["exact"] or row["predicted"] == row["measured"]
