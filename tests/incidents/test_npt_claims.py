"""Checks of the weight delta's report see models, configurations and loops that are not the incident's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from judged_claims import claims_of, judged

from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, counts
from memfix.incidents.config import RunConfig
from memfix.incidents.judging import JudgedClaim
from memfix.incidents.npt_weight_delta.checks import Evidence, delta, switches
from memfix.incidents.npt_weight_delta.layer import NptLinear
from memfix.incidents.npt_weight_delta.model import SIZES
from memfix.incidents.step import TrainStep

INCIDENT = "npt_weight_delta"


def judge(name: str, evidence: Evidence | None = None) -> JudgedClaim:
    return judged(INCIDENT, name, evidence)


def test_verdicts_as_recorded() -> None:
    recorded = [claim.verdict for claim in claims_of(INCIDENT).values()]
    assert counts(recorded) == {HOLDS: 25, WRONG: 9, NOT_TESTABLE: 1}


# ---------------------------------------------------------------- configurations
GIGABYTES = {
    "basic optimization": 79, "product of low rank": 79, "+ CPU offload": 78, "+ fp16": 40, "+ fewer layers": 35,
}  # fmt: skip


class Filling(Evidence):
    """Steps as large as the report's table has them."""

    def run_bytes(self, name: str) -> int:
        return GIGABYTES[name] * 10**9


@pytest.mark.parametrize("name", ["NPT-16", "NPT-28", "NPT-29", "NPT-30"])
def test_steps_of_the_reports_size_would_make_its_table_right(name: str) -> None:
    assert judge(name, Filling()).drift[0] == "recorded wrong, now holds"


def test_an_original_that_fits_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evidence, "run_bytes", lambda evidence, name: 10**9)
    assert judge("NPT-27").drift[0] == "recorded holds, now wrong"


class OfBatch4(Evidence):
    """The files as they were before the report's fix."""

    def config(self, *overrides: str, file: str = "") -> RunConfig:
        before = ("training.batch_size=4", "training.gradient_accumulation_steps=8")
        return super().config(*before, *overrides, file=file)


@pytest.mark.parametrize("name", ["NPT-12", "NPT-13", "NPT-35"])
def test_files_from_before_the_fix_are_seen(name: str) -> None:
    assert judge(name, OfBatch4()).drift[0] == "recorded holds, now wrong"


# ---------------------------------------------------------------- models and loops
def test_an_8b_of_the_7b_models_width_would_make_the_text_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "llama_8b", dataclasses.replace(SIZES["llama_8b"], ffn_width=11_008))
    assert judge("NPT-02").drift[0] == "recorded wrong, now holds"


def test_a_position_of_another_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = delta.compute_weight_delta
    monkeypatch.setattr(delta, "compute_weight_delta", lambda m, at, a, b: real(m, max(0, at - 1), a, b))
    assert judge("NPT-06").drift[0] == "recorded holds, now wrong"


def test_a_modulation_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(hidden: Any, weight: Any, a: Any, b: Any, modulation: Any, form: str = "") -> Any:
        return hidden @ weight + (hidden @ a) @ b + 0 * modulation.sum()

    monkeypatch.setattr(delta, "npt_linear", without)
    assert judge("NPT-19").drift[0] == "recorded holds, now wrong"


def test_an_accumulation_that_takes_means_of_forwards_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = TrainStep.accumulate

    def of_means(step: TrainStep, batches: Any, num_targets: float) -> Any:
        batches = list(batches)
        return [real(step, [one], switches.incident.num_targets(one) * len(batches)) for one in batches][-1]

    monkeypatch.setattr(TrainStep, "accumulate", of_means)
    assert judge("NPT-13").drift[0] == "recorded holds, now wrong"


def test_a_layer_that_takes_the_last_of_a_tuple_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = NptLinear.remember

    def of_last(layer: NptLinear, module: Any, args: Any, output: Any) -> Any:
        return real(layer, module, args, output[-1] if isinstance(output, tuple) else output)

    monkeypatch.setattr(NptLinear, "remember", of_last)
    assert judge("NPT-11").drifted
