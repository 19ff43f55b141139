"""Make a verdict of findings, readings and the lock. Pure: imports no torch and runs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from ..checks.examine import Examination
from ..checks.finding import Finding, Status, exit_code_of
from ..checks.measured import Bytes
from ..checks.memory import bytes_of, explained
from ..contract.case import is_variant
from ..errors import EXIT_PASS, EXIT_REGRESSION
from ..meters.base import Reading
from ..meters.difference import Change, changes
from ..meters.timeline import Allocation
from ..units import format_bytes, format_change
from .lock import Key, spelled
from .peaks import ROWS, Peaks

UPDATE = "memfix gate --update"
_GROWN_ROWS = 4


def _how_to_accept(command: str) -> str:
    return f"if this is meant, run {command} and commit the lock file"


@dataclass(frozen=True)
class Verdict:
    """Everything that the gate reports. ``findings`` are in the order in which they were made."""

    examinations: tuple[Examination, ...]
    findings: tuple[Finding, ...]
    meter: str
    notes: tuple[str, ...] = ()
    surroundings: Mapping[str, str] = field(default_factory=dict)

    def with_status(self, status: str) -> list[Finding]:
        return [finding for finding in self.findings if finding.status == status]

    @property
    def exit_code(self) -> int:
        return exit_code_of(self.findings)

    @property
    def word(self) -> str:
        return {EXIT_PASS: "pass", EXIT_REGRESSION: "regression"}.get(self.exit_code, "could not measure")

    def as_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.word,
            "exit_code": self.exit_code,
            "meter": self.meter,
            "notes": list(self.notes),
            "surroundings": dict(self.surroundings),
            "findings": [finding.as_dict() for finding in self.findings],
            "readings": [
                {"op": op, "form": form, "case": case, "phase": phase, "bytes": bytes_of(reading, phase),
                 "human": format_bytes(bytes_of(reading, phase)), **reading.as_dict()}
                for (op, form, case, phase), reading in readings_by_key(self.examinations).items()
            ],
        }  # fmt: skip


def readings_by_key(examinations: Sequence[Examination]) -> dict[Any, Reading]:
    return {
        (examination.op, form, case, phase): reading
        for examination in examinations
        for (form, case, phase), reading in examination.readings.items()
    }


def lockable_readings(examinations: Sequence[Examination]) -> dict[Any, Reading]:
    """Return the readings that belong in the lock: not those of the host, which depend on the version of Python."""
    return {key: reading for key, reading in readings_by_key(examinations).items() if reading.meter != "host"}


def not_run(examinations: Sequence[Examination], meter: str) -> dict[tuple[str, str, str], Reading]:
    """Return the forms and cases that do not fit the meter's GPU, each with its largest simulated reading."""
    largest: dict[tuple[str, str, str], Reading] = {}
    for (op, form, case, _), reading in readings_by_key(examinations).items():
        if reading.meter == "simulated" != meter:
            largest[op, form, case] = max(largest.get((op, form, case), reading), reading, key=lambda r: r.peak_bytes)
    return largest


def judge(
    examinations: Sequence[Examination],
    *,
    lock: Mapping[Key, int] | None,
    peaks: Peaks = MappingProxyType({}),
    meter: str,
    notes: Sequence[str] = (),
    extra: Sequence[Finding] = (),
    surroundings: Mapping[str, str] | None = None,
) -> Verdict:
    """Gather all findings and judge the lock. ``lock`` is None where the meter's bytes cannot be compared with it."""
    findings = [finding for examination in examinations for finding in examination.findings]
    findings += _nothing_measured(examinations)
    if lock is not None:
        findings += judge_lock(examinations, lock, peaks)
    sourced = _with_sources([*findings, *extra], readings_by_key(examinations))
    return Verdict(tuple(examinations), sourced, meter, tuple(notes), surroundings or {})


def judge_lock(examinations: Sequence[Examination], lock: Mapping[Key, int], peaks: Peaks) -> list[Finding]:
    """Compare every reading with its entry: above fails, below is a note, missing and stale entries fail. An op without
    any entry, or without any of a variant, fails once.

    A form that is not equal to naive is reported only if it is above its entry, since nobody should lock its bytes.
    """
    readings = lockable_readings(examinations)
    judged_ops = {examination.op for examination in examinations}
    # a form that is known to be unequal is never measured, so its entries are stale
    unequal = {
        (e.op, form) for e in examinations for form in e.forms[1:] if form not in e.equal_forms | e.known_unequal_forms
    }
    new = {_group(key) for key in readings if key[:2] not in unequal} - {_group(key) for key in lock}
    findings = [
        judge_entry(key, used, lock.get(key), reading, peaks.get(spelled(key), ()))
        for key, reading in readings.items()
        if (used := bytes_of(reading, key[3])) > lock.get(key, used) or key[:2] not in unequal
        if _group(key) not in new
    ]
    for op, is_of_variants in sorted(new):
        if not is_of_variants or (op, False) not in new:
            what = "a variant of this op, such as one with a frozen input" if is_of_variants else "this op"
            message = f"the lock has no entry of {what}; {_how_to_accept(f'memfix gate {op} --update')}"
            findings.append(Finding("lock", op, "", "fail", message))
    stale = f"the lock has an entry that nothing measures any more; {_how_to_accept(UPDATE)}"
    # some phases are derived from others: where one could not be measured, no entry of the case is stale
    unmeasured = {_key(finding)[:3] for e in examinations for finding in e.findings if finding.status == "error"}
    gone = [
        key
        for key in lock
        if key[0] in judged_ops and key not in readings and key[:3] not in unmeasured and key[:2] not in unequal
    ]
    return findings + [_lock_finding(key, "fail", stale, Bytes(None, lock[key], "lock")) for key in gone]


def _group(key: Key) -> tuple[str, bool]:
    return key[0], is_variant(key[2])


def judge_entry(
    key: Key,
    used: int,
    locked: int | None,
    reading: Reading,
    alive_then: Sequence[Allocation] = (),
    *,
    accept: str = UPDATE,
) -> Finding:
    """Compare one reading with its entry. ``alive_then`` is what was alive at the locked peak, where that is known;
    ``accept`` is the command that writes the new bytes to the lock."""
    measured = Bytes(used, locked, "lock")
    if locked is None:
        message = f"{format_bytes(used)} measured, and no entry in the lock; {_how_to_accept(accept)}"
        return _lock_finding(key, "fail", message, measured)
    if used > locked:
        message = (
            f"{used:,} bytes ({format_bytes(used)}), lock {locked:,} ({format_bytes(locked)}): "
            f"+{used - locked:,} ({format_change(used, locked)}), meter {reading.meter}"
        )
        grown = _what_grew(reading, alive_then)
        alive = explained(reading, key[3], used - locked)
        details = (*(f"  {change}" for change in grown), *alive, f"  {_how_to_accept(accept)}")
        source = _first_line([*(change.now for change in grown if change.now), *reading.alive_at_peak])
        return _lock_finding(key, "fail", message, measured, details, source)
    if used < locked:
        message = f"{format_bytes(used)}, {locked - used:,} bytes below the lock; run {accept} to keep the gain"
        return _lock_finding(key, "note", message, measured)
    return _lock_finding(key, "pass", f"{used:,} bytes, as locked", measured)


def judge_against_base(key: Key, now: Reading, then: Reading, ref: str) -> Finding:
    """Compare one reading with that of the same form at the commit ``ref``. Growth fails, as no lock allows it."""
    phase: Any = key[3]
    used, before = bytes_of(now, phase), bytes_of(then, phase)
    finding = judge_entry(key, used, before, now, then.alive_at_peak)
    message = f"{used:,} bytes ({format_bytes(used)}), at {ref} {before:,} ({format_bytes(before)})"
    details: tuple[str, ...] = ()
    if used > before:
        message += f": +{used - before:,} ({format_change(used, before)}), meter {now.meter}"
        details = (*finding.details[:-1], f"  if this is meant, keep the bytes in a lock: run {UPDATE} and commit it")
    return replace(finding, check="base", message=message, details=details, measured=Bytes(used, before, "base"))


def _what_grew(reading: Reading, alive_then: Sequence[Allocation]) -> list[Change]:
    """Return the allocations that are new at this peak or larger than at the locked one, largest first."""
    if not alive_then:
        return []
    # the file of peaks keeps only the largest rows: a smaller row may have been there too
    unseen = min(row.bytes for row in alive_then) if len(alive_then) >= ROWS else 0
    grown = [
        change
        for change in changes(alive_then, reading.alive_at_peak)
        if change.bytes > (unseen if change.before is None else 0)
    ]
    return grown[:_GROWN_ROWS]


def _first_line(rows: Sequence[Allocation]) -> str:
    """Return ``memfix/ops/loss/chunked.py:41`` of the first row that has a line."""
    return next((row.place.split(" in ")[0] for row in rows if row.place), "")


def _with_sources(findings: Sequence[Finding], readings: Mapping[Any, Reading]) -> tuple[Finding, ...]:
    """Give a broken budget the line that grew above the lock, or else that of the largest allocation at its peak.

    A drawn shape has neither: it gets the line that grew at a case of the same form.
    """
    grown = [finding for finding in findings if finding.check == "lock" and finding.source]
    by_key = {_key(finding): finding.source for finding in grown}
    by_form = {(finding.op, finding.form): finding.source for finding in reversed(grown)}

    def source_of(finding: Finding) -> str:
        key = _key(finding)
        if key in readings:
            return by_key.get(key) or _first_line(readings[key].alive_at_peak)
        return by_form.get((finding.op, finding.form), "")

    return tuple(
        replace(finding, source=source_of(finding))
        if finding.status == "fail" and _is_budget(finding) and not finding.source
        else finding
        for finding in findings
    )


def _is_budget(finding: Finding) -> bool:
    return isinstance(finding.measured, Bytes) and finding.measured.against == "budget"


def _key(finding: Finding) -> Any:
    return finding.op, finding.form, finding.case, finding.phase


def _lock_finding(
    key: Key, status: Status, message: str, measured: Bytes, details: tuple[str, ...] = (), source: str = ""
) -> Finding:
    op, form, case, phase = key
    return Finding("lock", op, form, status, message, case, phase, details, measured=measured, source=source)


def _nothing_measured(examinations: Sequence[Examination]) -> list[Finding]:
    """Return an error for each op without a reading: a gate that measured nothing must not pass."""
    if not examinations:
        return [Finding("memory", "gate", "", "error", "no op was examined: nothing was measured")]
    return [
        Finding("memory", examination.op, "", "error", "nothing was measured")
        for examination in examinations
        if not examination.readings
    ]
