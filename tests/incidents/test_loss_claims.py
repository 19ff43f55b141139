"""Checks of the long-context report see code, readings and profiles that are not the incident's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_claims import check_of, claims_of, evidence_of, judged

from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, counts
from memfix.incidents.long_context_loss.checks import TINY, Evidence, loss_values, rope
from memfix.laws import Phase
from memfix.units import format_bytes

INCIDENT = "long_context_loss"
CLAIMS = claims_of(INCIDENT)


def judge(name: str, evidence: Evidence | None = None) -> Any:
    return judged(INCIDENT, name, evidence)


def drifted(names: str) -> bool:
    return all(judge(f"LOG-{name}").drifted for name in names.split())


def test_verdicts_as_recorded() -> None:
    assert counts(claim.verdict for claim in CLAIMS.values()) == {HOLDS: 26, WRONG: 26, NOT_TESTABLE: 5}


# ---------------------------------------------------------------- checks of the whole model, on the tiny one
@pytest.fixture
def tiny_as_whole() -> Evidence:
    """Evidence whose profile of the whole model is the tiny one's."""
    other, shared = Evidence(), evidence_of(INCIDENT)
    rank = shared.profile(*TINY, world_size=2).reading
    planted = {"profile": shared.profile(*TINY), "later_step_bytes": rank.base_bytes + rank.peak_bytes}
    vars(other).update({name: lambda value=value, **_: value for name, value in planted.items()})
    return other


def test_checks_of_the_whole_model_read_the_stages_of_a_profile(tiny_as_whole: Evidence) -> None:
    tokens, width, ffn_width, vocabulary, item = 300, 64, 176, 512, 2
    slow = [claim for claim in CLAIMS.values() if claim.slow]
    figures = {claim.id: check_of(INCIDENT, claim.id)(tiny_as_whole).figures for claim in slow}
    assert figures["LOG-33"]["logits"] == format_bytes(tokens * vocabulary * item)
    assert figures["LOG-33"]["checkpointed"] == format_bytes(36 * tokens * width * item)
    # gate, its silu, up and their product
    assert figures["LOG-34"]["feed_forward"] == format_bytes(4 * tokens * ffn_width * item)
    assert figures["LOG-48"] == {"stages": 8, "peak": format_bytes(tiny_as_whole.profile().peak_bytes)}
    assert figures["LOG-44"]["on_rank"] == format_bytes(tiny_as_whole.later_step_bytes())


@pytest.mark.parametrize("name", ["LOG-33", "LOG-34", "LOG-38"])
def test_a_profile_of_something_else_is_drift(name: str, tiny_as_whole: Evidence) -> None:
    assert judge(name, tiny_as_whole).drift


def test_a_profile_without_a_stage_of_the_report_fails(tiny_as_whole: Evidence) -> None:
    whole = tiny_as_whole.profile()
    rows = tuple(row for row in whole.rows if row.stage.name != "backward")
    vars(tiny_as_whole)["profile"] = lambda **_: dataclasses.replace(whole, rows=rows)
    assert judge("LOG-48", tiny_as_whole).failed == "KeyError: 'backward'"


def test_a_step_that_did_split_in_half_would_be_seen(tiny_as_whole: Evidence) -> None:
    vars(tiny_as_whole)["later_step_bytes"] = lambda **_: 34 * 10**9
    assert judge("LOG-44", tiny_as_whole).drift == ("recorded wrong, now holds",)


# ---------------------------------------------------------------- other dims and readings
class OtherDims(Evidence):
    """The incident with a smaller vocabulary, shorter sequences and narrower layers."""

    @property
    def dims(self) -> dict[str, int]:
        return {**super().dims, "T": 100_000, "V": 100_000, "D": 2048}


@pytest.mark.parametrize("name", ["LOG-02", *(claim.id for claim in CLAIMS.values() if claim.formula)])
def test_other_dims_are_drift(name: str) -> None:
    assert judge(name, OtherDims()).drift


class SmallerPeaks(Evidence):
    """Readings a quarter smaller, as if somebody had changed the forms or the meter."""

    def peak(self, form: str, phase: Phase, **of: Any) -> int:
        return evidence_of(INCIDENT).peak(form, phase, **of) * 3 // 4


MEASURED = [
    "LOG-03", "LOG-04", "LOG-12", "LOG-21", "LOG-22", "LOG-35", "LOG-36", "LOG-37", "LOG-55", "LOG-57",
]  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_other_readings_are_drift(name: str) -> None:
    assert judge(name, SmallerPeaks()).drift


# ---------------------------------------------------------------- mutants: code that is wrong on purpose
def test_a_mean_of_chunk_means_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_means(hidden: Any, weight: Any, target: Any, *, rows_per_chunk: int = 4096, **_: Any) -> torch.Tensor:
        parts = zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
        return torch.stack([torch.nn.functional.cross_entropy(h @ weight.T, t) for h, t in parts]).nanmean()

    monkeypatch.setattr(loss_values, "reported_linear_cross_entropy", mean_of_means)
    assert drifted("10 14 16 51 56")


def test_another_default_chunk_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss_values.reported_linear_cross_entropy

    def by_2048(*tensors: Any, rows_per_chunk: int = 2048, **options: Any) -> torch.Tensor:
        return real(*tensors, rows_per_chunk=rows_per_chunk, **options)

    monkeypatch.setattr(loss_values, "reported_linear_cross_entropy", by_2048)
    assert drifted("10")
    assert not drifted("14")


@pytest.mark.parametrize("threshold", ["10000000000", "1GiB"])
def test_another_threshold_is_seen(threshold: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_values, "REPORTED_SWITCH", threshold)
    assert drifted("13")
    assert drifted("20 51 52") == (threshold == "1GiB")


def test_labels_that_are_not_shifted_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_values, "next_labels", lambda labels: labels)
    assert drifted("09 10 14 15 51 56")


def test_positions_in_float32_would_make_the_fix_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class KeepsFloat32(rope.ReportedRotary):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            return self if torch.bfloat16 in args else super().to(*args, **kwargs)

    monkeypatch.setattr(rope, "ReportedRotary", KeepsFloat32)
    got = judge("LOG-27")
    assert got.drift[0] == "recorded wrong, now holds"


def test_a_cache_that_is_made_anew_each_call_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverReuses(rope.ReportedRotary):
        def forward(self, x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
            self._grow(offset + x.shape[-3])
            return super().forward(x, offset=offset)

    monkeypatch.setattr(rope, "ReportedRotary", NeverReuses)
    assert drifted("23 28")


def test_a_fix_that_stays_on_the_cpu_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = rope.ReportedRotary
    monkeypatch.setattr(
        rope, "ReportedRotary", lambda *args, **kwargs: real(*args, **{**kwargs, "positions_on_cpu": True})
    )
    assert drifted("26")
    assert not drifted("23")


# ---------------------------------------------------------------- on a GPU
def test_without_measurements_speed_is_left_to_a_gpu(tmp_path: Path) -> None:
    got = judge("LOG-54", Evidence(results=tmp_path))
    assert (got.verdict, got.drifted) == (NOT_TESTABLE, False)
    assert got.true == "needs a GPU: memfix check linear_cross_entropy --speed --device cuda"
    speed_file(tmp_path, form="checkpoint")
    assert judge("LOG-54", Evidence(results=tmp_path)) == got


def test_a_loop_that_is_5_to_10_percent_slower_would_hold(tmp_path: Path) -> None:
    speed_file(tmp_path, form="reported")
    assert judge("LOG-54", Evidence(results=tmp_path)).drift == ("recorded wrong, now holds",)


def speed_file(folder: Path, form: str) -> None:
    timed = {"check": "speed", "op": "linear_cross_entropy", "form": form, "figures": {"ratio": 1.07}}
    findings = [{**timed, "case": case} for case in ("incident", "medium")]
    (folder / "speed.json").write_text(json.dumps({"findings": findings}))
