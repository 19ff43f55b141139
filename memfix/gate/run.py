"""The gate's course: examine every op, hold it against lock and base, and judge."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..checks.effort import Effort
from ..checks.examine import Examination
from ..checks.finding import Finding
from ..checks.phase_bytes import bytes_of
from ..contract import Contract
from ..errors import LockConflict, MemfixError, UsageError
from ..meters import usable_meter
from ..provenance import describe
from ..units import format_bytes, format_change
from .base import JUDGED, Base, examine_under, judge_changes, law_changes, laws_under, lock_changes
from .judge import Verdict, judge, lockable_readings, not_run, readings_by_key
from .lock import Key, read_lock, spelled, write_lock
from .peaks import Peaks, peaks_path, read_peaks, write_peaks
from .workers import examine_all

Say = Callable[[str], None]


def run_gate(
    contracts: Sequence[Contract],
    *,
    meter_name: str,
    effort: Effort,
    lock_path: Path | None,
    base_ref: str | None = None,
    update: bool = False,
    whole: bool = True,
    say: Say = lambda _: None,
) -> Verdict:
    """Judge ``contracts``. ``whole``: they are all there are, so lock entries of other ops are stale."""
    lock, trouble = _read_lock(lock_path, rewrites=update and whole) if lock_path else ({}, "")
    base = Base.of(base_ref, Path(__file__).resolve().parents[1]) if base_ref else None
    meter, fallback = usable_meter(meter_name)
    notes = [*(_notes_of(base, contracts) if base else []), *([fallback] if fallback else [])]
    examinations = examine_all(contracts, meter, effort, say)
    notes += [*_estimates(examinations), *_not_run(examinations, meter.name)]
    extra = _under_base(base, contracts, lock, lock_path, effort, meter.name, say) if base else []
    lock_speaks = lock_path is not None and meter.simulation is not None
    if lock_path is not None and not lock_speaks:
        notes.append(f"the lock was not judged: it holds simulated bytes, and the meter is {meter.name}")
    if update and lock_speaks and lock_path is not None:
        before_lock = judge(examinations, lock=None, meter=meter.name, extra=extra)
        if before_lock.exit_code == 0:
            updated = _updated_lock(lock, examinations, whole)
            notes += _raised(lock, updated)
            write_lock(lock_path, updated)
            write_peaks(peaks_path(lock_path), _updated_peaks(read_peaks(peaks_path(lock_path)), updated, examinations))
            lock, trouble = updated, ""
        else:
            notes.append("the lock was not updated: something else than the lock fails")
    if trouble and lock_speaks and lockable_readings(examinations):
        lock_speaks = False
        extra = [*extra, Finding("lock", "gate", "", "fail", trouble)]
    if whole and lock_speaks:
        extra = [*extra, *_ops_only_in_lock(lock, examinations)]
    return judge(
        examinations, lock=lock if lock_speaks else None,
        peaks=read_peaks(peaks_path(lock_path)) if lock_path else {},
        meter=meter.name, notes=notes, extra=extra, surroundings=describe(),
    )  # fmt: skip


def _read_lock(path: Path, *, rewrites: bool) -> tuple[dict[Key, int], str]:
    """The entries, and why there are none to judge by. A lock that is rewritten whole need not be readable before."""
    try:
        lock = read_lock(path)
    except LockConflict as conflict:
        if rewrites:
            return {}, str(conflict)
        raise
    if path.exists():
        return lock, ""
    return lock, (
        f"there is no lock file {path}: run memfix gate --update, which writes today's bytes to it, and commit it with "
        f"{peaks_path(path).name}; --no-lock judges without one"
    )


def _notes_of(base: Base, contracts: Sequence[Contract]) -> list[str]:
    """The laws of another package's ops are not looked up: that is said, and where there are no others refused."""
    others = [contract.name for contract in contracts if contract.name not in base.ops_here()]
    if not others:
        return base.notes(*JUDGED)
    what = f"--base holds the laws of memfix's own ops; {', '.join(others)} {'is' if len(others) == 1 else 'are'} none"
    if len(others) == len(contracts):
        raise UsageError(f"{what}: a lock holds its bytes, and --time --base its times")
    return [*base.notes(*JUDGED), what]


def _estimates(examinations: Sequence[Examination]) -> list[str]:
    """Readings that are not exact say so, once for each form and reason."""
    said = {
        f"{op}/{form}: an estimate: {note}": None
        for (op, form, _, _), reading in readings_by_key(examinations).items()
        if not reading.exact
        for note in reading.notes
    }
    return list(said)


def _not_run(examinations: Sequence[Examination], meter: str) -> list[str]:
    """Says of forms that the meter's GPU cannot hold what they would take."""
    return [
        f"{op}/{form} [{case}] was not run: it would take {format_bytes(reading.peak_bytes)} above "
        f"{format_bytes(reading.base_bytes)} of inputs and does not fit this GPU; its bytes are simulated"
        for (op, form, case), reading in not_run(examinations, meter).items()
    ]


def _under_base(
    base: Base,
    contracts: Sequence[Contract],
    lock: dict[Key, int],
    lock_path: Path | None,
    effort: Effort,
    meter: str,
    say: Say,
) -> list[Finding]:
    """What the base's laws say of today's forms, and how the two laws differ."""
    by_name = {contract.name: contract for contract in contracts}
    rows = base.gone_ops("law")
    changed = [op for op in base.ops_with_other_laws() if op in by_name]
    rows += [Finding("law", op, "", "note", f"new: no law at {base.ref}") for op in changed if base.is_new(op)]
    judged = [op for op in changed if not base.is_new(op)]
    if lock_path is not None:
        rows += lock_changes(base.lock(lock_path), lock, base.ref)
    judges = base.judges_changed()
    if judges:
        rows += judge_changes(judges, base.ref)
        return rows + _under_checks_of(base, by_name, judged, effort, meter, say)
    for op in judged:
        say(f"{op}: today's forms under the laws of {base.ref}")
        with base.laid_over([op]) as overlay:
            try:
                rows += law_changes(by_name[op], laws_under(overlay, [op])[op], base.ref)
                found = examine_under(overlay, [op], effort.name, meter)["findings"]
            except MemfixError as error:
                if base.has_moved(op):  # its old contract need not go together with today's forms: a reader compares
                    rows.append(Finding("law", op, "", "note", f"was declared elsewhere at {base.ref}: {error}"))
                else:
                    rows.append(Finding("base law", op, "", "error", str(error)))
                continue
        rows += _under_laws_of(base.ref, found)
    return rows


def _under_checks_of(
    base: Base, contracts: Mapping[str, Contract], changed: Sequence[str], effort: Effort, meter: str, say: Say
) -> list[Finding]:
    """What the base's checks say of today's forms under its laws, and how the laws of ``changed`` ops differ."""
    ops = [op for op in contracts if op in base.ops_here() and not base.is_new(op)]
    say(f"today's forms under the checks and laws of {base.ref}")
    rows: list[Finding] = []
    with base.with_todays_forms() as overlay:
        try:
            laws = laws_under(overlay, ops)
            for op in changed:
                rows += law_changes(contracts[op], laws[op], base.ref)
            found = examine_under(overlay, ops, effort.name, meter)["findings"]
        except MemfixError as error:
            # a change of memfix's own house; the rows say where to read
            return [*rows, Finding("law", "memfix", "", "note", f"not judged by the checks of {base.ref}: {error}")]
    return rows + _under_laws_of(base.ref, found)


def _under_laws_of(ref: str, report: list[dict[str, Any]]) -> list[Finding]:
    """The findings of the base's report, without its commands: these would run under today's laws."""
    found = [Finding.from_dict(data) for data in report]
    return [
        replace(f, check="base law", message=f"under the laws of {ref}: {f.check}: {f.message}", reproduce="")
        for f in found
        if f.status != "note"
    ]


def _updated_lock(lock: dict[Key, int], examinations: Sequence[Examination], whole: bool) -> dict[Key, int]:
    """Today's readings; entries of ops that were not examined stay, unless all were."""
    judged = {examination.op for examination in examinations}
    kept = {} if whole else {key: size for key, size in lock.items() if key[0] not in judged}
    return kept | {key: bytes_of(reading, key[3]) for key, reading in lockable_readings(examinations).items()}


def _updated_peaks(peaks: Peaks, lock: dict[Key, int], examinations: Sequence[Examination]) -> Peaks:
    """What is alive at today's peaks, for the entries of the lock that are peaks."""
    readings = lockable_readings(examinations)
    of_today = {spelled(key): reading.alive_at_peak for key, reading in readings.items()}
    kept = {spelled(key) for key in lock if key[3] != "held"}
    return {key: rows for key, rows in {**peaks, **of_today}.items() if key in kept}


def _raised(before: dict[Key, int], now: dict[Key, int]) -> list[str]:
    return [
        f"this update raises {spelled(key)}: {format_bytes(before[key])} -> {format_bytes(now[key])} "
        f"({format_change(now[key], before[key])})"
        for key in sorted(before.keys() & now.keys())
        if now[key] > before[key]
    ]


def _ops_only_in_lock(lock: dict[Key, int], examinations: Sequence[Examination]) -> list[Finding]:
    gone = {key[0] for key in lock} - {examination.op for examination in examinations}
    message = "the lock has entries of an op that is not there any more; run memfix gate --update"
    return [Finding("lock", op, "", "fail", message) for op in sorted(gone)]
