"""The verdict as SARIF 2.1.0: a code review shows each failure on its line.

GitHub refuses a whole file if one result has no place in the repository. So a finding whose line is elsewhere, as in an
installed package, is put at the first line of the file that registers ops: ``pyproject.toml``.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from typing import Any
from urllib.parse import quote

from ... import __version__
from ...checks.finding import Finding
from ..judge import Verdict
from .place import place_in_repository, repository_root
from .text import printable

SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
_LEVELS = {"fail": "error", "error": "warning"}
_RULES = {
    "equality": "A form must give what naive gives, within its tolerance.",
    "bad input": "A call that the contract calls bad must be refused, by the message that it declares.",
    "memory": "A form must be measurable.",
    "variant": "A form must be measurable with every option.",
    "budget": "A peak must be within its budget.",
    "scaling": "A peak must not grow faster than its law.",
    "leak": "A call must not leave memory behind.",
    "kept": "A call must not keep memory for good.",
    "compile": "A kernel must compile for the simulated GPU.",
    "lock": "Bytes must not be above the lock file.",
    "base": "Bytes must not be above those at the base commit.",
    "base law": "Today's forms must keep the laws of the base commit.",
    "time": "A form must not be slower than at the base commit.",
    "speed": "A form must not be slower beside naive than its contract allows.",
    "agreement": "The simulated meter must read the bytes of a real GPU.",
    "canary": "The clock must notice a form that was made slower on purpose.",
}


def as_sarif(verdict: Verdict) -> str:
    broken = [finding for finding in verdict.findings if finding.status in _LEVELS]
    checks = list(dict.fromkeys(finding.check for finding in broken))
    seen: Counter[str] = Counter()
    run = {
        "tool": {"driver": {"name": "memfix", "version": __version__, "rules": [_rule(check) for check in checks]}},
        "columnKind": "unicodeCodePoints",
        "invocations": [{"executionSuccessful": not verdict.with_status("error"), "exitCode": verdict.exit_code}],
        "results": [_result(finding, checks, seen) for finding in broken],
    }
    return json.dumps({"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _rule_id(check: str) -> str:
    return f"memfix/{check.replace(' ', '-')}"


def _rule(check: str) -> dict[str, Any]:
    about = _RULES.get(check, f"The check {check} must pass.")
    name = "".join(word.capitalize() for word in check.split())
    return {"id": _rule_id(check), "name": name, "shortDescription": {"text": about}}


def _result(finding: Finding, checks: list[str], seen: Counter[str]) -> dict[str, Any]:
    # without line or bytes, so that the same failure is the same alert after the next commit
    subject = f"{finding.check}: {finding.subject}"
    seen[subject] += 1
    fingerprint = f"{hashlib.sha256(subject.encode()).hexdigest()[:16]}:{seen[subject]}"
    registration = f"{repository_root() / 'pyproject.toml'}:1"
    place = place_in_repository(finding.source) or place_in_repository(registration)
    return {
        "ruleId": _rule_id(finding.check),
        "ruleIndex": checks.index(finding.check),
        "level": _LEVELS[finding.status],
        # a bracket followed by a parenthesis would be a link
        "message": {"text": printable(finding.text()).replace("](", "] (")},
        # GitHub reads the first name only
        "partialFingerprints": {"primaryLocationLineHash": fingerprint, "memfixFinding/v1": fingerprint},
        **({"locations": [_location(*place)]} if place else {}),
    }


def _location(path: str, line: int) -> dict[str, Any]:
    artifact = {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    return {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}
