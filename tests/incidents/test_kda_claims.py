"""The KDA report's claims: each is judged anew, comes to what is recorded, and can come to something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix.gate.lock import read_lock
from memfix.incidents.claims import HOLDS, NOT_TESTABLE, WRONG, Claim, answer, counts, load_checks, load_claims
from memfix.incidents.kda_transitions import block as blocks
from memfix.incidents.kda_transitions.claim_checks import CHECKS, Evidence, knobs, on_a_gpu, transitions, values
from memfix.laws import Phase
from memfix.meters.base import Reading

CLAIMS = {claim.id: claim for claim in load_claims("kda_transitions")}
QUICK = [claim for claim in CLAIMS.values() if not claim.slow]
LOCK = read_lock(Path(__file__).resolve().parents[2] / "benchmarks/memory.lock")
ON_A_GPU = {"KDA-24", "KDA-28"}


def called(claim: Claim) -> str:
    return claim.id


class LockedEvidence(Evidence):
    """What training takes at the incident is the lock's, which the gate holds to the byte; the rest is measured."""

    def reading(self, form: str, phase: Phase, **changed: Any) -> Reading:
        changed = {name: value for name, value in changed.items() if value != self.case.settings.get(name)}
        if phase == "forward" or changed:
            return super().reading(form, phase, **changed)
        locked = LOCK[self.contract.name, form, self.case.name, phase]
        return Reading("simulated", "H200", locked, 0, locked, 0, locked)


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """What is measured, once for all tests."""
    return LockedEvidence()


def drifted(name: str, evidence: Evidence) -> bool:
    return answer(CLAIMS[name], CHECKS, evidence).drifted


# ---------------------------------------------------------------- the file
def test_every_claim_of_the_report_is_there_once_and_in_order() -> None:
    assert list(CLAIMS) == [f"KDA-{number:02}" for number in range(1, 35)]


def test_verdicts_as_recorded() -> None:
    assert counts(claim.verdict for claim in CLAIMS.values()) == {HOLDS: 24, WRONG: 6, NOT_TESTABLE: 4}


def test_every_check_belongs_to_a_claim_and_every_claim_to_a_check() -> None:
    assert {claim.check for claim in CLAIMS.values() if claim.check} == CHECKS.keys()
    assert load_checks("kda_transitions").CHECKS is CHECKS


def test_a_claim_that_is_not_testable_says_why() -> None:
    for claim in CLAIMS.values():
        assert bool(claim.reason) == (claim.verdict == NOT_TESTABLE), claim.id
        assert claim.reason or claim.correction, claim.id


# ---------------------------------------------------------------- judged now
@pytest.mark.parametrize("claim", QUICK, ids=called)
def test_a_claim_comes_to_what_is_recorded(claim: Claim, evidence: Evidence) -> None:
    got = answer(claim, CHECKS, evidence)
    assert (got.failed, got.drift) == ("", ())
    assert got.verdict == claim.verdict
    assert got.true
    assert "{" not in got.true


@pytest.mark.slow
def test_the_card_is_filled_by_layers(evidence: Evidence, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("memfix_profile") != "thorough":
        pytest.skip("simulates twelve dense layers: --memfix-profile thorough, or memfix incidents")
    got = answer(CLAIMS["KDA-11"], CHECKS, evidence)
    assert (got.failed, got.drift, got.verdict) == ("", (), WRONG)


# ---------------------------------------------------------------- and can fail
class OtherDims(Evidence):
    """The incident with more heads."""

    @property
    def dims(self) -> dict[str, int]:  # type: ignore[override]
        return {**super().dims, "H": 12}


@pytest.mark.parametrize("name", ["KDA-01", "KDA-07", "KDA-08"])
def test_other_dims_are_drift(name: str) -> None:
    assert drifted(name, OtherDims())


class SmallerPeaks(Evidence):
    """Readings a quarter smaller, as if somebody had changed the forms or the meter."""

    def __init__(self, real: Evidence) -> None:
        super().__init__()
        self._real = real

    def peak(self, form: str, phase: Phase, **changed: Any) -> int:
        return self._real.peak(form, phase, **changed) * 3 // 4


@pytest.mark.parametrize("name", ["KDA-23", "KDA-34"])
def test_other_readings_are_drift(name: str, evidence: Evidence) -> None:
    assert drifted(name, SmallerPeaks(evidence))


def test_a_fix_that_did_reduce_the_peak_would_be_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = evidence.reading
    monkeypatch.setattr(evidence, "reading", lambda form, *rest: real(form.replace("reported", "wy"), *rest))
    assert answer(CLAIMS["KDA-20"], CHECKS, evidence).drift[0] == "recorded wrong, now holds"


def test_a_chunk_that_forgets_its_decay_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = values.precompute_updates

    def without_decay(k: Any, v: Any, g: Any, beta: Any, memory_chunk_size: int = 64) -> Any:
        return real(k, v, g if memory_chunk_size > 32 else torch.zeros_like(g), beta, memory_chunk_size)

    monkeypatch.setattr(values, "precompute_updates", without_decay)
    assert drifted("KDA-29", evidence)


def test_a_matrix_of_another_rank_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = transitions.precompute_updates

    def two_ranks(k: torch.Tensor, *rest: torch.Tensor) -> Any:
        made, writes = real(k, *rest)
        return made + k.roll(1, -1).unsqueeze(-1) * k.unsqueeze(-2), writes

    monkeypatch.setattr(transitions, "precompute_updates", two_ranks)
    assert drifted("KDA-06", evidence)


def test_a_block_that_keeps_the_size_to_itself_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = blocks.attend_of
    monkeypatch.setattr(blocks, "attend_of", lambda mode, form, size: real(mode, form, 64))
    assert drifted("KDA-17", evidence)


def test_another_range_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(knobs, "RECOMMENDED", range(16, 129))
    assert answer(CLAIMS["KDA-30"], CHECKS, evidence).drift[0] == "recorded wrong, now holds"


# ---------------------------------------------------------------- on a GPU
@pytest.fixture
def speed_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(on_a_gpu, "SPEED_FILE", tmp_path / "kda_chunks.json")
    return on_a_gpu.SPEED_FILE


@pytest.mark.parametrize("name", sorted(ON_A_GPU))
def test_without_measurements_speed_is_left_to_a_gpu(name: str, evidence: Evidence, speed_file: Path) -> None:
    got = answer(CLAIMS[name], CHECKS, evidence)
    assert got.verdict == NOT_TESTABLE
    assert got.true == "not measured yet: python -m benchmarks.compare kda --table chunks on a GPU"
    speed_file.write_text("{}")
    assert answer(CLAIMS[name], CHECKS, evidence).verdict == NOT_TESTABLE


def measured_in_chunks(rows: dict[int, dict[str, Any]]) -> str:
    """What ``benchmarks.compare`` writes of the streamed form, by chunk size and phase."""
    entries = [
        {"dims": {"chunk_size": size}, "phases": {p: {"rows": {"streamed": row}} for p, row in of_size.items()}}
        for size, of_size in rows.items()
    ]
    return json.dumps({"speed": entries})


@pytest.mark.parametrize(("train", "verdict"), [(1.05, HOLDS), (1.31, WRONG), (0.98, WRONG)])
def test_5_percent_is_held_against_what_was_measured(
    train: float, verdict: str, evidence: Evidence, speed_file: Path
) -> None:
    spread = {"low": 1.01, "high": 1.4}
    medians = {"forward": 1.04, "train": train}
    speed_file.write_text(
        measured_in_chunks({64: {p: {"pairs_over_naive": {**spread, "median": m}} for p, m in medians.items()}})
    )
    got = answer(CLAIMS["KDA-28"], CHECKS, evidence)
    assert got.verdict == verdict
    assert got.true.startswith("streamed at chunk 64 over dense: forward +4 % (+1 to +40), train ")


@pytest.mark.parametrize(("of_128", "verdict"), [(2.0, HOLDS), (3.1, HOLDS), (5.0, WRONG)])
def test_the_order_of_chunks_is_held_against_what_was_measured(
    of_128: float, verdict: str, evidence: Evidence, speed_file: Path
) -> None:
    times_ms = {32: 4.0, 64: 3.0, 128: of_128}
    speed_file.write_text(
        measured_in_chunks(
            {size: {"forward": {"seconds": 5e-3}, "train": {"seconds": time / 1e3}} for size, time in times_ms.items()}
        )
    )
    assert answer(CLAIMS["KDA-24"], CHECKS, evidence).verdict == verdict
