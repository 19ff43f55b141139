"""Checks of the vocabulary's report see models, kernels and GPU results that are not the incident's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from judged_claims import claims_of, judged

from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, counts
from memfix.incidents.judging import JudgedClaim
from memfix.incidents.pythia_vocabulary.checks import Evidence, kernels, tools

INCIDENT = "pythia_vocabulary"


def judge(name: str, evidence: Evidence | None = None) -> JudgedClaim:
    return judged(INCIDENT, name, evidence)


def test_verdicts_as_recorded() -> None:
    recorded = [claim.verdict for claim in claims_of(INCIDENT).values()]
    assert counts(recorded) == {HOLDS: 25, WRONG: 18, NOT_TESTABLE: 1}


class Larger(Evidence):
    """Layers of the size that the report counts: 11 million parameters."""

    def model(self, *overrides: str) -> Any:
        return super().model(*overrides, "model.width=960", "model.heads=8")


@pytest.mark.parametrize("name", ["PYT-28", "PYT-30", "PYT-43"])
def test_a_larger_model_is_drift(name: str) -> None:
    assert judge(name, Larger()).drifted


def test_layers_of_11_million_would_make_the_reports_row_right() -> None:
    assert judge("PYT-28", Larger()).drift[0] == "recorded wrong, now holds"


class Slower(Evidence):
    """Steps that fill the card."""

    def later_step_bytes(self, *overrides: str, world_size: int = 1) -> int:
        return (90 if "model.vocab_size=50000" in overrides else 2) << 30


@pytest.mark.parametrize("name", ["PYT-03", "PYT-21"])
def test_a_vocabulary_that_filled_the_card_would_be_seen(name: str) -> None:
    assert judge(name, Slower()).drift[0] == "recorded wrong, now holds"


# ---------------------------------------------------------------- kernels
@pytest.mark.parametrize(
    ("old", "new", "name"),
    [("#pragma unroll\n        for", "for", "PYT-40"), ("#define TILE 16", "#define TILE 32", "PYT-14")],
)
def test_another_source_is_seen(old: str, new: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = tmp_path / "matmul.cu"
    text = kernels.SOURCE.read_text(encoding="utf-8")
    assert old in text
    source.write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(kernels, "SOURCE", source)
    assert judge(name).drifted


def test_a_maximum_that_keeps_nan_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "row_max", lambda x: x.amax(1))
    assert judge("PYT-41").drift[0] == "recorded holds, now wrong"


def test_without_a_compiler_kernels_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "cannot_emulate", lambda: "there is none")
    got = judge("PYT-13")
    assert (got.verdict, got.drifted, got.true) == (NOT_TESTABLE, False, "needs a C++ compiler: there is none")


def with_results(folder: Path, times: dict[int, float]) -> Evidence:
    """What ``benchmarks.compare`` writes, by size: one thread over tiles."""
    rows = {
        size: {"one_thread": {"seconds": ratio}, "tiled": {"seconds": 1.0}, "naive": {"seconds": 0.1}}
        for size, ratio in times.items()
    }
    entries = [{"dims": {"M": size}, "phases": {"forward": {"rows": of}}} for size, of in rows.items()]
    (folder / "matmul_sizes.json").write_text(json.dumps({"speed": entries}))
    return Evidence(results=folder)


@pytest.mark.parametrize(("ratio", "verdict"), [(2.4, HOLDS), (1.3, WRONG), (3.9, WRONG)])
def test_2_to_3_times_is_held_against_what_was_measured(ratio: float, verdict: str, tmp_path: Path) -> None:
    got = judge("PYT-42", with_results(tmp_path, {512: 1.1, 1024: ratio, 2048: 9.0}))
    assert got.verdict == verdict
    assert f"{ratio:.2f} at 1024" in got.true


def test_without_measurements_speed_is_left_to_a_gpu(tmp_path: Path) -> None:
    got = judge("PYT-42", Evidence(results=tmp_path))
    assert (got.verdict, got.drifted) == (NOT_TESTABLE, False)


# ---------------------------------------------------------------- commands
def test_a_window_that_hides_a_token_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tools.window_attention
    monkeypatch.setattr(tools, "window_attention", lambda q, k, v, window: real(q, k, v, window=max(1, window - 1)))
    assert judge("PYT-20").drift[0] == "recorded holds, now wrong"


def test_a_key_that_has_gone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tools.KEYS, "--sparse", "model.sparse=true")
    assert "unknown key model.sparse" in judge("PYT-18").failed
