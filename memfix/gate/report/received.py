"""Read a verdict from an untrusted JSON report, such as the artifact of a fork's run.

Nothing in it is trusted: a report is refused in one sentence where it is too large, has a key or a type that memfix
does not write, or a verdict that does not follow from its findings.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

from ...checks.examine import Examination, Where
from ...checks.finding import Finding
from ...errors import UsageError
from ...laws import NAIVE, Phase
from ...meters.base import Reading
from ..judge import Verdict
from . import as_json
from .schema import checked, kinds_of

_FINDING: Any = {**kinds_of(Finding), "figures": dict[str, float], "subject": str}
del _FINDING["measured"]  # JSON has its figures
_ROW: Any = {
    **kinds_of(Reading), "timeline": NoneType, "op": str, "form": str, "case": str, "phase": Phase, "bytes": int,
    "human": str,
}  # fmt: skip
_REPORT: Any = {
    "verdict": str, "exit_code": int, "meter": str, "notes": tuple[str, ...], "surroundings": dict[str, str],
    "findings": tuple[_FINDING, ...], "readings": tuple[_ROW, ...],
}  # fmt: skip
_OF_READING = {field.name for field in dataclasses.fields(Reading)}


def received_verdict(data: Any) -> Verdict:
    """Return the verdict that ``memfix gate --json`` wrote as ``data``."""
    if isinstance(data, dict) and data.keys() == {"readings", "notes"}:
        raise UsageError("it is pytest's report, which has no verdict; memfix gate --json writes one")
    report = checked(data, _REPORT)
    findings = tuple(Finding.from_dict(finding) for finding in report["findings"])
    verdict = Verdict(
        _examinations(findings, report["readings"]), findings, report["meter"], report["notes"], report["surroundings"]
    )
    if json.loads(as_json(verdict.as_dict())) != data:
        raise UsageError("its verdict, subjects and sizes must follow from its findings and readings, and they do not")
    return verdict


def _examinations(findings: Sequence[Finding], rows: Sequence[Mapping[str, Any]]) -> tuple[Examination, ...]:
    """Return one for each op, or none where no bytes were measured, as by the time gate."""
    readings: dict[str, dict[Where, Reading]] = defaultdict(dict)
    forms: dict[str, dict[str, None]] = defaultdict(lambda: {NAIVE: None})
    for row in rows:
        reading = Reading(**{key: row[key] for key in _OF_READING & row.keys()})
        readings[row["op"]][row["form"], row["case"], row["phase"]] = reading
        forms[row["op"]][row["form"]] = None
    for finding in findings:
        if finding.form and finding.check != "lock":  # a form in lock findings alone no longer exists
            forms[finding.op][finding.form] = None
    return tuple(Examination(op, tuple(forms[op]), (), readings[op], frozenset()) for op in forms) if rows else ()
