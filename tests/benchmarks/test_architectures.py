"""Every architecture of ``transformers``: which configuration is tried, what a row says, and what an H200 showed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

from benchmarks import architectures
from benchmarks.architectures import main, row_of

RESULTS = Path(__file__).parents[2] / "benchmarks/results/h200/architectures.json"


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
    row = row_of("causal language model", "Model")
    assert row["exact"]
    tables = row["predicted"] / (1000 * 128 * 4)  # the gradient and what clipping or AdamW need beside it
    assert 2 <= tables < 3


def test_an_architecture_that_never_runs_is_left_out_with_the_first_reason() -> None:
    row = row_of("masked language model", "Broken")
    assert row["left_out"] == "ValueError: heads must be 64 wide"


def test_a_refused_step_is_no_reason_to_leave_an_architecture_out() -> None:
    row = row_of("causal language model", "Refused")
    assert row["error"].startswith("MeasurementError: the step needs the values of a tensor (aten._unique2.default)")


def test_one_that_takes_too_long_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: _Model, config: _Config) -> None:
        raise architectures._Late("it takes longer than 120 s")

    monkeypatch.setattr(_Model, "__init__", late)
    assert row_of("causal language model", "Model")["left_out"] == "it takes longer than 120 s"


def test_transformers_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures, "not_installed", lambda packages: "transformers not installed")
    result = CliRunner().invoke(main, [])
    assert (result.exit_code, "transformers not installed" in result.output) == (2, True)


def test_no_prediction_was_wrong_on_an_h200() -> None:
    rows = [row for row in json.loads(RESULTS.read_text())["workloads"].values() if "left_out" not in row]
    assert len(rows) > 500
    for row in rows:
        low, high = row.get("at_least", row["predicted"]), row.get("at_most", row["predicted"])
        assert low <= row["measured"] <= high
        assert not row["exact"] or row["predicted"] == row["measured"]
