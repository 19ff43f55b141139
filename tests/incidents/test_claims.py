"""Every claim of every incident: it is judged anew, comes to what is recorded, and can come to something else."""

from __future__ import annotations

import dataclasses
import re

import pytest
from judged_claims import checks_of, claims_of, judged, judged_once

from memfix.incidents import incident_names
from memfix.incidents.claims import HOLDS, NOT_TESTABLE, VERDICTS, WRONG, Claim
from memfix.incidents.judging import CheckResult, JudgedClaim, compared_with_record

INCIDENTS = [name for name in incident_names() if claims_of(name)]
EVERY = [(incident, claim) for incident in INCIDENTS for claim in claims_of(incident).values()]
QUICK, SLOW = ([(incident, claim) for incident, claim in EVERY if claim.slow == slow] for slow in (False, True))
COMPUTED = [(incident, claim) for incident, claim in QUICK if not claim.reason]


def of_each(pairs: list[tuple[str, Claim]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("incident", "claim"), pairs, ids=[claim.id for _, claim in pairs])


# ---------------------------------------------------------------- the files
@pytest.mark.parametrize("incident", INCIDENTS)
def test_claims_are_numbered_in_order(incident: str) -> None:
    names = list(claims_of(incident))
    prefix = names[0].split("-")[0]
    assert names == [f"{prefix}-{number:02}" for number in range(1, len(names) + 1)]


@pytest.mark.parametrize("incident", INCIDENTS)
def test_every_claim_has_one_thing_that_decides_it(incident: str) -> None:
    checks = checks_of(incident).by_claim
    assert {claim.id for claim in claims_of(incident).values() if not (claim.formula or claim.reason)} == checks.keys()


@of_each(EVERY)
def test_a_claim_that_is_not_testable_says_why_and_no_other_does(incident: str, claim: Claim) -> None:
    assert bool(claim.reason) == (claim.verdict == NOT_TESTABLE)
    assert claim.reason or claim.correction


# ---------------------------------------------------------------- judged now
def require_as_recorded(got: JudgedClaim) -> None:
    assert (got.failed, got.drift, got.verdict) == ("", (), got.claim.verdict)
    assert got.true
    assert not re.search(r"\{\w+\}", got.true)
    assert got.how or got.claim.reason


@of_each(QUICK)
def test_a_claim_comes_to_what_is_recorded(incident: str, claim: Claim) -> None:
    require_as_recorded(judged_once(incident, claim.id))


@pytest.mark.slow
@of_each(SLOW)
def test_a_claim_about_the_whole_model_comes_to_what_is_recorded(
    incident: str, claim: Claim, pytestconfig: pytest.Config
) -> None:
    if pytestconfig.getoption("memfix_profile") != "thorough":
        pytest.skip("simulates the whole model for a minute or two: --memfix-profile thorough, or memfix incidents")
    require_as_recorded(judged_once(incident, claim.id))


# ---------------------------------------------------------------- and can fail
@of_each(QUICK)
def test_another_recorded_verdict_is_drift(incident: str, claim: Claim) -> None:
    for verdict in set(VERDICTS) - {claim.verdict}:
        planted = compared_with_record(dataclasses.replace(claim, verdict=verdict), found(incident, claim))
        assert planted.drift == (f"recorded {verdict}, now {claim.verdict}",)


@of_each(COMPUTED)
def test_another_recorded_figure_is_drift(incident: str, claim: Claim) -> None:
    for name, value in claim.expected.items():
        other = dataclasses.replace(claim, expected={**claim.expected, name: "another"})
        planted = compared_with_record(other, found(incident, claim))
        assert planted.drift == (f"{name}: recorded another, now {value}",)


@of_each(COMPUTED)
def test_another_computed_figure_is_drift(incident: str, claim: Claim) -> None:
    got = found(incident, claim)
    for name, value in claim.expected.items():
        planted = dataclasses.replace(got, figures={**got.figures, name: "another"})
        assert compared_with_record(claim, planted).drift == (f"{name}: recorded {value}, now another",)


def found(incident: str, claim: Claim) -> CheckResult:
    """What the claim's check came to."""
    got = judged_once(incident, claim.id)
    return CheckResult({HOLDS: True, WRONG: False, NOT_TESTABLE: None, None: None}[got.verdict], got.how, got.figures)


@of_each([(incident, claim) for incident, claim in QUICK if claim.formula and claim.verdict == WRONG])
def test_a_size_claimed_in_the_right_unit_would_hold(
    incident: str, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_binary = dataclasses.replace(claim, claimed=claim.claimed.replace("GB", "GiB").replace("MB", "MiB"))
    monkeypatch.setitem(claims_of(incident), claim.id, in_binary)
    assert judged(incident, claim.id).drift == ("recorded wrong, now holds",)
