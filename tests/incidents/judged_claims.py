"""Judges a claim of an incident by its name, for tests; what is measured is measured once a process."""

from __future__ import annotations

import functools
from typing import Any

from memfix.incidents.claims import Claim, load_claims
from memfix.incidents.judging import ClaimCheck, IncidentChecks, JudgedClaim, judge_claim, load_checks


@functools.cache
def claims_of(incident: str) -> dict[str, Claim]:
    return {claim.id: claim for claim in load_claims(incident)}


@functools.cache
def checks_of(incident: str) -> IncidentChecks:
    return load_checks(incident)


@functools.cache
def evidence_of(incident: str) -> Any:
    return checks_of(incident).evidence()


def check_of(incident: str, name: str) -> ClaimCheck | None:
    return checks_of(incident).by_claim.get(name)


def judged(incident: str, name: str, evidence: Any = None) -> JudgedClaim:
    """The claim, judged now by ``evidence``, or by what all tests share."""
    evidence = evidence or evidence_of(incident)
    return judge_claim(claims_of(incident)[name], check_of(incident, name), evidence)


@functools.cache
def judged_once(incident: str, name: str) -> JudgedClaim:
    return judged(incident, name)
