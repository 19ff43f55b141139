"""Checks of the KDA report see code, readings and GPU results that are not the incident's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from judged_claims import claims_of, judged

from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, counts
from memfix.incidents.judging import JudgedClaim
from memfix.incidents.kda_transitions import block as blocks
from memfix.incidents.kda_transitions.checks import Evidence, knobs, transitions, values
from memfix.laws import Phase

INCIDENT = "kda_transitions"


def judge(name: str, evidence: Evidence | None = None) -> JudgedClaim:
    return judged(INCIDENT, name, evidence)


def drifted(name: str) -> bool:
    return judge(name).drifted


def test_verdicts_as_recorded() -> None:
    recorded = [claim.verdict for claim in claims_of(INCIDENT).values()]
    assert counts(recorded) == {HOLDS: 24, WRONG: 6, NOT_TESTABLE: 4}


# ---------------------------------------------------------------- other dims, readings and code
class OtherDims(Evidence):
    """The incident with more heads."""

    @property
    def dims(self) -> dict[str, int]:
        return {**super().dims, "H": 12}


@pytest.mark.parametrize("name", ["KDA-01", "KDA-07", "KDA-08"])
def test_other_dims_are_drift(name: str) -> None:
    assert judge(name, OtherDims()).drifted


class OtherPeaks(Evidence):
    """Peaks that are not the op's, as if somebody had changed the forms or the meter; this fix does reduce them."""

    def peak(self, form: str, phase: Phase, **of: Any) -> int:
        return of.get("chunk_size", 64) << 20

    def times_below(self, form: str, phase: Phase, **of: Any) -> float:
        return 4.2


@pytest.mark.parametrize("name", ["KDA-23", "KDA-34"])
def test_other_readings_are_drift(name: str) -> None:
    assert judge(name, OtherPeaks()).drifted


def test_a_fix_that_did_reduce_the_peak_would_be_seen() -> None:
    assert judge("KDA-20", OtherPeaks()).drift[0] == "recorded wrong, now holds"


def test_a_chunk_that_forgets_its_decay_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = values.precompute_updates

    def without_decay(k: Any, v: Any, g: Any, beta: Any, memory_chunk_size: int = 64) -> Any:
        return real(k, v, g if memory_chunk_size > 32 else torch.zeros_like(g), beta, memory_chunk_size)

    monkeypatch.setattr(values, "precompute_updates", without_decay)
    assert drifted("KDA-29")


def test_a_matrix_of_another_rank_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = transitions.precompute_updates

    def two_ranks(k: torch.Tensor, *rest: torch.Tensor) -> Any:
        made, writes = real(k, *rest)
        return made + k.roll(1, -1).unsqueeze(-1) * k.unsqueeze(-2), writes

    monkeypatch.setattr(transitions, "precompute_updates", two_ranks)
    assert drifted("KDA-06")


def test_a_block_that_keeps_the_size_to_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = blocks.attend_of
    monkeypatch.setattr(blocks, "attend_of", lambda mode, form, size: real(mode, form, 64))
    assert drifted("KDA-17")


def test_another_range_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "RECOMMENDED", range(16, 129))
    assert judge("KDA-30").drift[0] == "recorded wrong, now holds"


# ---------------------------------------------------------------- on a GPU
def with_results(folder: Path, rows: dict[int, dict[str, Any]]) -> Evidence:
    """What ``benchmarks.compare`` writes of the streamed form, by chunk size and phase."""
    entries = [
        {"dims": {"chunk_size": size}, "phases": {p: {"rows": {"streamed": row}} for p, row in of_size.items()}}
        for size, of_size in rows.items()
    ]
    (folder / "kda_chunks.json").write_text(json.dumps({"speed": entries}))
    return Evidence(results=folder)


@pytest.mark.parametrize("name", ["KDA-24", "KDA-28"])
def test_without_measurements_speed_is_left_to_a_gpu(name: str, tmp_path: Path) -> None:
    got = judge(name, Evidence(results=tmp_path))
    assert (got.verdict, got.drifted) == (NOT_TESTABLE, False)
    assert got.true == "needs a GPU: python -m benchmarks.compare kda --table chunks"
    assert judge(name, with_results(tmp_path, {})) == got


@pytest.mark.parametrize(("train", "verdict"), [(1.05, HOLDS), (1.31, WRONG), (0.98, WRONG)])
def test_5_percent_is_held_against_what_was_measured(train: float, verdict: str, tmp_path: Path) -> None:
    spread = {"low": 1.01, "high": 1.4}
    medians = {"forward": 1.04, "train": train}
    pairs = {phase: {"pairs_over_naive": {**spread, "median": median}} for phase, median in medians.items()}
    got = judge("KDA-28", with_results(tmp_path, {64: pairs}))
    assert got.verdict == verdict
    assert got.true.startswith("streamed at chunk 64 over dense: forward +4 % (+1 to +40), train ")


@pytest.mark.parametrize(("of_128", "verdict"), [(2.0, HOLDS), (3.1, HOLDS), (3.3, WRONG), (5.0, WRONG)])
def test_the_order_of_chunks_is_held_against_what_was_measured(of_128: float, verdict: str, tmp_path: Path) -> None:
    """Times that overlap do not contradict it: those of a chunk size differ by 10 % here."""

    def row(ms: float) -> dict[str, Any]:
        return {"seconds": ms / 1e3, "times_s": [0.95 * ms / 1e3, ms / 1e3, 1.04 * ms / 1e3]}

    by_chunk = {size: {"forward": row(5), "train": row(train)} for size, train in {32: 4, 64: 3, 128: of_128}.items()}
    assert judge("KDA-24", with_results(tmp_path, by_chunk)).verdict == verdict
