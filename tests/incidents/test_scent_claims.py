"""Checks of the decoder's report see models and steps that are not the incident's."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from judged_claims import claims_of, judged

from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, counts
from memfix.incidents.judging import JudgedClaim
from memfix.incidents.scent_decoder.checks import Evidence, behaviour, held_bytes, naive_feed_forward
from memfix.incidents.scent_decoder.incident import RUNS
from memfix.incidents.scent_decoder.layers import FeedForward
from memfix.incidents.scent_decoder.model import ScentModel

INCIDENT = "scent_decoder"


def judge(name: str, evidence: Evidence | None = None) -> JudgedClaim:
    return judged(INCIDENT, name, evidence)


def test_verdicts_as_recorded() -> None:
    recorded = [claim.verdict for claim in claims_of(INCIDENT).values()]
    assert counts(recorded) == {HOLDS: 23, WRONG: 17, NOT_TESTABLE: 4}


# ---------------------------------------------------------------- steps
GIGABYTES = {
    "original": 40, "1: feed-forwards alone": 5, "2: attention to 256 latents": 6, "3: batch 16": 10,
    "4: checkpointing": 20, "1 with our feed-forward": 1, "our attention": 30,
    "our attention and feed-forward": 10, "both, checkpointed": 4, "5: num_layers 2": 50, "5: 16 x 16 pixels": 50,
}  # fmt: skip


class AsReported(Evidence):
    """Steps as large as the report says."""

    def run_bytes(self, name: str) -> int:
        return GIGABYTES[name] * 10**9


@pytest.mark.parametrize("name", ["SCN-15", "SCN-31", "SCN-34", "SCN-36", "SCN-37"])
def test_steps_of_the_reports_size_would_make_it_right(name: str) -> None:
    assert judge(name, AsReported()).drift[0] == "recorded wrong, now holds"


@pytest.mark.parametrize("name", ["SCN-33", "SCN-43"])
def test_steps_that_do_not_get_smaller_are_seen(name: str) -> None:
    assert judge(name, AsReported()).drift[0] == "recorded holds, now wrong"


class HeldTwice(Evidence):
    """A step that has a gradient of everything that a forward holds."""

    def run_bytes(self, name: str) -> int:
        return 2 * self.held_by_model() + 16 * 41_403_142


def test_gradients_of_all_layers_at_once_would_double_the_step() -> None:
    assert judge("SCN-12", HeldTwice()).drift[0] == "recorded wrong, now holds"


# ---------------------------------------------------------------- times of steps
class Timed(Evidence):
    """Steps that took these seconds on the H200."""

    times_s: ClassVar[dict[str, tuple[float, ...]]] = {}

    def run_times_s(self, name: str) -> tuple[float, ...]:
        return self.times_s[name]


@pytest.mark.parametrize(
    ("name", "run", "seconds", "drift"),
    [
        ("SCN-29", "3: batch 16", (0.9, 1.0, 1.1), "recorded wrong, now holds"),
        ("SCN-32", "4: checkpointing", (1.29, 1.30, 1.31), None),
        ("SCN-32", "4: checkpointing", (1.29, 1.30, 1.36), "recorded holds, now wrong"),
        ("SCN-32", "4: checkpointing", (1.20, 1.30, 1.31), "recorded holds, now wrong"),
        ("SCN-32", "4: checkpointing", (1.50, 1.50, 1.50), "recorded holds, now wrong"),
    ],
)
def test_steps_of_other_times_change_the_verdict(
    name: str, run: str, seconds: tuple[float, ...], drift: str | None
) -> None:
    class Others(Timed):
        times_s: ClassVar = {"original": (1.0, 1.0, 1.0), run: seconds}

    found = [line for line in judge(name, Others()).drift if line.startswith("recorded")]
    assert found == ([drift] if drift else [])


@pytest.mark.parametrize("name", ["SCN-29", "SCN-32"])
@pytest.mark.parametrize("times_s", [None, []])
def test_without_kept_times_the_claim_waits_for_a_gpu(name: str, times_s: list[float] | None, tmp_path: Path) -> None:
    if times_s is not None:
        runs = [{"name": run.name, "peak_bytes": 5, "failed": None, "times_s": times_s} for run in RUNS]
        (tmp_path / "profile_scent_decoder.json").write_text(json.dumps({"runs": runs}))
    found = judge(name, Evidence(results=tmp_path))
    assert (found.verdict, found.drifted) == (NOT_TESTABLE, False)
    assert found.true.startswith("needs a GPU: memfix profile scent_decoder --meter cuda")


# ---------------------------------------------------------------- models
def test_held_bytes_are_those_of_a_layer_on_the_cpu() -> None:
    """17 tensors of the input's size and two statistics of the norm for each position; parameters do not count."""
    layer = naive_feed_forward(8)
    assert held_bytes(layer, torch.randn(2, 3, 8, requires_grad=True)) == 2 * 3 * (17 * 8 * 4 + 8)


class OfTwoLayers(Evidence):
    def config(self, *overrides: str, file: str = "") -> Any:
        return super().config(*overrides, "model.num_layers=2", file=file)


@pytest.mark.parametrize("name", ["SCN-08", "SCN-11", "SCN-40"])
def test_another_number_of_layers_is_seen(name: str) -> None:
    assert judge(name, OfTwoLayers()).drifted


def test_a_larger_image_is_seen() -> None:
    class Larger(Evidence):
        def config(self, *overrides: str, file: str = "") -> Any:
            return super().config(*overrides, "data.resolution=64", file=file)

    for name in ("SCN-01", "SCN-06"):
        assert judge(name, Larger()).drift[0] == "recorded holds, now wrong"


def test_a_gate_that_is_not_gelu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(behaviour, "F", SimpleNamespace(gelu=torch.relu))
    assert judge("SCN-22").drift[0] == "recorded holds, now wrong"


def test_a_decoder_without_skips_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ScentModel.decode
    monkeypatch.setattr(ScentModel, "decode", lambda model, latents, at: real(model, latents, 0 * at))
    assert judge("SCN-23").drift[0] == "recorded holds, now wrong"


def test_a_checkpoint_that_draws_anew_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.utils.checkpoint.checkpoint

    def draws_anew(*args: Any, **options: Any) -> Any:
        return real(*args, **options | {"preserve_rng_state": False})

    monkeypatch.setattr("memfix.incidents.decoder_parts.checkpoint", draws_anew)
    assert judge("SCN-30").drift[0] == "recorded holds, now wrong"


def test_our_form_that_computes_something_else_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = FeedForward.forward

    def off(layer: FeedForward, *args: Any) -> torch.Tensor:
        out = real(layer, *args)
        return out if layer.form == "naive" else 1.001 * out

    monkeypatch.setattr(FeedForward, "forward", off)
    assert "function: recorded the same, now another" in judge("SCN-43", AsReported()).drift
