"""The report's claims: each is judged anew, comes to what is recorded, and can come to something else."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from memfix.errors import UsageError
from memfix.incidents import claims as judging
from memfix.incidents.claims import (
    HOLDS,
    NOT_TESTABLE,
    VERDICTS,
    WRONG,
    Answer,
    Claim,
    ClaimsError,
    Found,
    Quantity,
    answer,
    chosen_claims,
    counts,
    judged,
    load_checks,
    load_claims,
    parsed_claims,
)
from memfix.incidents.long_context_loss.claim_checks import CHECKS, Evidence, loss_values, on_a_gpu, rope
from memfix.laws import Phase
from memfix.units import GiB, format_bytes

CLAIMS = {claim.id: claim for claim in load_claims("long_context_loss")}
QUICK, SLOW = ([claim for claim in CLAIMS.values() if claim.slow == slow] for slow in (False, True))
COMPUTED = [claim for claim in QUICK if not claim.reason]


def called(claim: Claim) -> str:
    return claim.id


@pytest.fixture(scope="module")
def evidence() -> Evidence:
    """What is measured, once for all tests."""
    return Evidence()


@pytest.fixture(scope="module")
def answered(evidence: Evidence) -> Callable[[Claim], Answer]:
    known: dict[str, Answer] = {}

    def answered(claim: Claim) -> Answer:
        if claim.id not in known:
            known[claim.id] = answer(claim, CHECKS, evidence)
        return known[claim.id]

    return answered


# ---------------------------------------------------------------- the file
def test_every_claim_of_the_report_is_there_once_and_in_order() -> None:
    assert list(CLAIMS) == [f"LOG-{number:02}" for number in range(1, 58)]


def test_verdicts_as_recorded() -> None:
    assert counts(claim.verdict for claim in CLAIMS.values()) == {HOLDS: 26, WRONG: 26, NOT_TESTABLE: 5}


def test_every_check_belongs_to_a_claim_and_every_claim_to_a_check() -> None:
    assert {claim.check for claim in CLAIMS.values() if claim.check} == CHECKS.keys()
    assert load_checks("long_context_loss").CHECKS is CHECKS


def test_a_claim_that_is_not_testable_says_why_and_no_other_does() -> None:
    for claim in CLAIMS.values():
        assert bool(claim.reason) == (claim.verdict == NOT_TESTABLE), claim.id
        assert claim.reason or claim.correction, claim.id


# ---------------------------------------------------------------- judged now
@pytest.mark.parametrize("claim", QUICK, ids=called)
def test_a_claim_comes_to_what_is_recorded(claim: Claim, answered: Callable[[Claim], Answer]) -> None:
    got = answered(claim)
    assert (got.failed, got.drift) == ("", ())
    assert got.verdict == claim.verdict
    assert got.true
    assert "{" not in got.true
    assert got.how or claim.reason


@pytest.mark.slow
@pytest.mark.usefixtures("_thorough")
@pytest.mark.parametrize("claim", SLOW, ids=called)
def test_a_claim_about_the_whole_model_comes_to_what_is_recorded(
    claim: Claim, answered: Callable[[Claim], Answer]
) -> None:
    got = answered(claim)
    assert (got.failed, got.drift, got.verdict) == ("", (), claim.verdict)


@pytest.fixture
def _thorough(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("memfix_profile") != "thorough":
        pytest.skip("simulates the whole model for a minute or two: --memfix-profile thorough, or memfix incidents")


# ---------------------------------------------------------------- checks of the whole model, on the tiny one
@pytest.fixture
def tiny_as_whole(evidence: Evidence) -> Evidence:
    """Evidence whose profile of the whole model is the tiny one's."""
    other = Evidence()
    vars(other).update(profile=evidence.tiny, sharded=evidence.tiny_sharded.reading)
    return other


def test_checks_of_the_whole_model_read_the_stages_of_a_profile(tiny_as_whole: Evidence) -> None:
    tokens, width, ffn_width, vocabulary, item = 300, 64, 176, 512, 2
    figures = {claim.id: CHECKS[claim.check](tiny_as_whole).figures for claim in SLOW}
    assert figures["LOG-33"]["logits"] == format_bytes(tokens * vocabulary * item)
    assert figures["LOG-33"]["checkpointed"] == format_bytes(36 * tokens * width * item)
    # gate, its silu, up and their product
    assert figures["LOG-34"]["feed_forward"] == format_bytes(4 * tokens * ffn_width * item)
    assert figures["LOG-48"] == {"stages": 8, "peak": format_bytes(tiny_as_whole.profile.peak_bytes)}
    rank = tiny_as_whole.sharded
    assert figures["LOG-44"]["on_rank"] == format_bytes(rank.base_bytes + rank.peak_bytes)


@pytest.mark.parametrize("name", ["LOG-33", "LOG-34", "LOG-38"])
def test_a_profile_of_something_else_is_drift(name: str, tiny_as_whole: Evidence) -> None:
    assert answer(CLAIMS[name], CHECKS, tiny_as_whole).drift


def test_a_profile_without_a_stage_of_the_report_fails(tiny_as_whole: Evidence) -> None:
    rows = tuple(row for row in tiny_as_whole.profile.rows if row.stage.name != "backward")
    vars(tiny_as_whole)["profile"] = dataclasses.replace(tiny_as_whole.profile, rows=rows)
    assert answer(CLAIMS["LOG-48"], CHECKS, tiny_as_whole).failed == "KeyError: 'backward'"


def test_a_step_that_did_split_in_half_would_be_seen(tiny_as_whole: Evidence) -> None:
    halved = dataclasses.replace(tiny_as_whole.sharded, base_bytes=0, peak_bytes=34 * 10**9)
    vars(tiny_as_whole)["sharded"] = halved
    assert answer(CLAIMS["LOG-44"], CHECKS, tiny_as_whole).drift == ("recorded wrong, now holds",)


# ---------------------------------------------------------------- and can fail
@pytest.mark.parametrize("claim", QUICK, ids=called)
def test_another_recorded_verdict_is_drift(claim: Claim, answered: Callable[[Claim], Answer]) -> None:
    got = answered(claim)
    for verdict in set(VERDICTS) - {claim.verdict}:
        found = Found(_truth_of(got), got.how, got.figures)
        planted = judged(dataclasses.replace(claim, verdict=verdict), found)
        assert planted.drift == (f"recorded {verdict}, now {claim.verdict}",)


@pytest.mark.parametrize("claim", COMPUTED, ids=called)
def test_another_recorded_figure_is_drift(claim: Claim, answered: Callable[[Claim], Answer]) -> None:
    got = answered(claim)
    found = Found(_truth_of(got), got.how, got.figures)
    for name, value in claim.expected.items():
        planted = judged(dataclasses.replace(claim, expected={**claim.expected, name: "another"}), found)
        assert planted.drift == (f"{name}: recorded another, now {value}",)


@pytest.mark.parametrize("claim", COMPUTED, ids=called)
def test_another_computed_figure_is_drift(claim: Claim, answered: Callable[[Claim], Answer]) -> None:
    got = answered(claim)
    for name, value in claim.expected.items():
        found = Found(_truth_of(got), got.how, {**got.figures, name: "another"})
        assert judged(claim, found).drift == (f"{name}: recorded {value}, now another",)


def _truth_of(got: Answer) -> bool | None:
    return {HOLDS: True, WRONG: False, NOT_TESTABLE: None, None: None}[got.verdict]


@pytest.mark.parametrize("claim", [claim for claim in QUICK if claim.formula], ids=called)
def test_a_size_claimed_in_the_right_unit_would_hold(claim: Claim, evidence: Evidence) -> None:
    in_binary = dataclasses.replace(claim, claimed=claim.claimed.replace("GB", "GiB").replace("MB", "MiB"))
    assert answer(in_binary, CHECKS, evidence).drift == ("recorded wrong, now holds",)


class OtherDims(Evidence):
    """The incident with a smaller vocabulary, shorter sequences and narrower layers."""

    @property
    def dims(self) -> dict[str, int]:  # type: ignore[override]
        return {**super().dims, "T": 100_000, "V": 100_000, "D": 2048}


@pytest.mark.parametrize("claim", [c for c in QUICK if c.formula or c.check == "incident_dims"], ids=called)
def test_other_dims_are_drift(claim: Claim) -> None:
    assert answer(claim, CHECKS, OtherDims()).drift


class SmallerPeaks(Evidence):
    """Readings a quarter smaller, as if somebody had changed the forms or the meter."""

    def __init__(self, real: Evidence) -> None:
        super().__init__()
        self._real = real

    def peak(self, form: str, phase: Phase, *, in_float32: bool = False) -> int:
        return self._real.peak(form, phase, in_float32=in_float32) * 3 // 4


MEASURED = [
    "LOG-03", "LOG-04", "LOG-12", "LOG-21", "LOG-22", "LOG-35", "LOG-36", "LOG-37", "LOG-55", "LOG-57",
]  # fmt: skip


@pytest.mark.parametrize("name", MEASURED)
def test_other_readings_are_drift(name: str, evidence: Evidence) -> None:
    assert answer(CLAIMS[name], CHECKS, SmallerPeaks(evidence)).drift


# ---------------------------------------------------------------- mutants: code that is wrong on purpose
def drifted(names: str, evidence: Evidence) -> bool:
    return all(answer(CLAIMS[f"LOG-{name}"], CHECKS, evidence).drifted for name in names.split())


def test_a_mean_of_chunk_means_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_of_means(hidden: Any, weight: Any, target: Any, *, rows_per_chunk: int = 4096, **_: Any) -> torch.Tensor:
        parts = zip(hidden.split(rows_per_chunk), target.split(rows_per_chunk), strict=True)
        return torch.stack([torch.nn.functional.cross_entropy(h @ weight.T, t) for h, t in parts]).nanmean()

    monkeypatch.setattr(loss_values, "reported_linear_cross_entropy", mean_of_means)
    assert drifted("10 14 16 51 56", evidence)


def test_another_default_chunk_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss_values.reported_linear_cross_entropy

    def by_2048(*tensors: Any, rows_per_chunk: int = 2048, **options: Any) -> torch.Tensor:
        return real(*tensors, rows_per_chunk=rows_per_chunk, **options)

    monkeypatch.setattr(loss_values, "reported_linear_cross_entropy", by_2048)
    assert drifted("10", evidence)
    assert not drifted("14", evidence)


@pytest.mark.parametrize("threshold", ["10000000000", "1GiB"])
def test_another_threshold_is_seen(threshold: str, evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = loss_values.chosen_form
    monkeypatch.setattr(
        loss_values, "chosen_form", lambda hidden, weight: real(hidden, weight, standard_up_to=threshold)
    )
    assert drifted("13", evidence)
    assert drifted("20 51 52", evidence) == (threshold == "1GiB")


def test_labels_that_are_not_shifted_are_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_values, "next_labels", lambda labels: labels)
    assert drifted("09 10 14 15 51 56", evidence)


def test_positions_in_float32_would_make_the_fix_whole(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    class KeepsFloat32(rope.ReportedRotary):
        def to(self, *args: Any, **kwargs: Any) -> Any:
            return self if torch.bfloat16 in args else super().to(*args, **kwargs)

    monkeypatch.setattr(rope, "ReportedRotary", KeepsFloat32)
    got = answer(CLAIMS["LOG-27"], CHECKS, evidence)
    assert got.drift[0] == "recorded wrong, now holds"


def test_a_cache_that_is_made_anew_each_call_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    class NeverReuses(rope.ReportedRotary):
        def forward(self, x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
            self._grow(offset + x.shape[-3])
            return super().forward(x, offset=offset)

    monkeypatch.setattr(rope, "ReportedRotary", NeverReuses)
    assert drifted("23 28", evidence)


def test_a_fix_that_stays_on_the_cpu_is_seen(evidence: Evidence, monkeypatch: pytest.MonkeyPatch) -> None:
    real = rope.ReportedRotary
    monkeypatch.setattr(
        rope, "ReportedRotary", lambda *args, **kwargs: real(*args, **{**kwargs, "positions_on_cpu": True})
    )
    assert drifted("26", evidence)
    assert not drifted("23", evidence)


# ---------------------------------------------------------------- what cannot be known here, and what breaks
def test_without_measurements_speed_is_left_to_a_gpu(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(on_a_gpu, "SPEED_FILE", tmp_path / "speed.json")
    got = answer(CLAIMS["LOG-54"], CHECKS, evidence)
    assert (got.verdict, got.drifted) == (NOT_TESTABLE, False)
    assert got.true == "needs a GPU: memfix check linear_cross_entropy --speed --device cuda"


def test_a_loop_that_is_5_to_10_percent_slower_would_hold(
    evidence: Evidence, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(on_a_gpu, "SPEED_FILE", tmp_path / "speed.json")
    timed = {"check": "speed", "op": "linear_cross_entropy", "form": "reported"}
    findings = [{**timed, "case": case, "figures": {"ratio": 1.07}} for case in ("incident", "medium")]
    on_a_gpu.SPEED_FILE.write_text(json.dumps({"findings": findings}))
    assert answer(CLAIMS["LOG-54"], CHECKS, evidence).drift == ("recorded wrong, now holds",)


def test_a_check_that_breaks_is_drift_and_says_how(evidence: Evidence) -> None:
    def broken(_: Evidence) -> Found:
        raise ZeroDivisionError("no tokens")

    got = answer(CLAIMS["LOG-12"], {"one_chunk_at_a_time": broken}, evidence)
    assert (got.verdict, got.failed, got.drifted) == (None, "ZeroDivisionError: no tokens", True)


def test_what_is_measured_is_measured_once(evidence: Evidence) -> None:
    assert evidence.reading("naive", "train") is evidence.reading("naive", "train")


# ---------------------------------------------------------------- sizes as a report prints them
@pytest.mark.parametrize(
    ("claimed", "count", "is_met"),
    [
        ("37.09 GB", 37_090_000_000, True),
        ("37.09 GB", 37_094_999_999, True),
        ("37.09 GB", 37_096_000_000, False),
        ("37.09 GiB", int(37.09375 * GiB), True),
        ("~74 GB", 74_400_000_000, True),
        ("~74 GB", 74_600_000_000, False),
        ("37-74 GB", 74_000_000_000, True),
        ("37-74 GB", 36_400_000_000, False),
        ("640 MB", 640 << 20, False),
        ("640 MiB", 640 << 20, True),
    ],
)
def test_a_size_is_met_to_the_digits_that_are_printed(claimed: str, count: int, is_met: bool) -> None:
    assert Quantity.parsed(claimed).is_met_by(count) == is_met


@pytest.mark.parametrize("text", ["", "37.09", "GB", "37.09 GBs", "about 37 GB", "3.92B params"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ClaimsError, match="cannot read"):
        Quantity.parsed(text)


# ---------------------------------------------------------------- files that are written wrongly
CLAIM = """
[[claim]]
id = "X-1"
section = "Summary"
lines = "1"
statement = "It takes 1 GiB"
claimed = "1 GiB"
verdict = "holds"
formula = "GiB"
expected = { bytes = 1073741824 }
"""


def test_a_claim_by_a_formula_is_read_and_judged(evidence: Evidence) -> None:
    (claim,) = parsed_claims(CLAIM)
    assert answer(claim, {}, evidence).drifted is False


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("lines =", "line =", "X-1: unknown key 'line'; did you mean 'lines'?"),
        ('lines = "1"\n', "", "X-1: lines missing"),
        ('"holds"', '"hold"', "X-1: unknown verdict 'hold'; did you mean 'holds'?"),
        ('formula = "GiB"', "", "X-1: a claim has a formula, a check or a reason why it cannot be tested: one"),
        ('formula = "GiB"', 'formula = "GiB"\ncheck = "so"', "X-1: a claim has a formula, a check or a reason"),
        ("expected = { bytes = 1073741824 }", "", "X-1: expected is empty: name a figure"),
        ('claimed = "1 GiB"', "", "cannot read '' as a size"),
        ("[[claim]]", CLAIM + "[[claim]]", "two claims are called X-1"),
    ],
)
def test_a_file_that_is_written_wrongly_is_refused(old: str, new: str, message: str) -> None:
    with pytest.raises(ClaimsError) as error:
        parsed_claims(CLAIM.replace(old, new))
    assert message in str(error.value)


def test_names_that_nobody_computes_are_refused(evidence: Evidence) -> None:
    (claim,) = parsed_claims(CLAIM)
    with pytest.raises(ClaimsError, match="X-1: the correction names 'mean', which its check does not compute"):
        answer(dataclasses.replace(claim, correction="{mean}"), {}, evidence)
    with pytest.raises(ClaimsError, match="X-1: no check 'one_chunk'; did you mean 'one_chunk_at_a_time'"):
        answer(dataclasses.replace(claim, formula="", check="one_chunk"), CHECKS, evidence)


def test_claims_are_chosen_by_name() -> None:
    everything = list(CLAIMS.values())
    assert [claim.id for claim in chosen_claims(everything, ["LOG-12", "LOG-03", "LOG-12"])] == ["LOG-12", "LOG-03"]
    assert chosen_claims(everything) == everything
    with pytest.raises(UsageError, match="no claim 'LOG-1'; did you mean"):
        chosen_claims(everything, ["LOG-1"])


def test_an_incident_without_claims_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "CLAIMS_FILE", "nobody_wrote_them.toml")
    assert load_claims("long_context_loss") == []
