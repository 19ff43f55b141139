"""Run the gate: examine every op, compare it with the lock and the base, and judge."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from ..checks.effort import Effort
from ..checks.examine import Examination, Tools
from ..checks.finding import Finding
from ..checks.memory import bytes_of
from ..contract import Contract
from ..errors import LockConflict
from ..meters import usable_meter
from ..progress import Say, silent
from ..provenance import describe
from ..units import format_bytes, format_change
from .against_base import bases_of
from .judge import Verdict, judge, lockable_readings, not_run, readings_by_key
from .lock import Key, read_lock, spelled, write_lock
from .peaks import Peaks, peaks_path, read_peaks, write_peaks
from .workers import examine_all


def run_gate(
    contracts: Sequence[Contract],
    *,
    meter_name: str,
    effort: Effort,
    lock_path: Path | None,
    base_ref: str | None = None,
    update: bool = False,
    whole: bool = True,
    say: Say = silent,
) -> Verdict:
    """Judge ``contracts``. ``whole``: they are all contracts, so lock entries of other ops are stale."""
    lock, trouble = _read_lock(lock_path, rewrites=update and whole) if lock_path else ({}, "")
    meter = usable_meter(meter_name)
    tools = Tools(meter, effort, say)
    lock_speaks = lock_path is not None and meter.simulation is not None
    with bases_of(base_ref, contracts) if base_ref else nullcontext() as base:
        examinations = examine_all(contracts, meter, effort, say)
        notes = [*(base.notes if base else []), *_estimates(examinations), *_not_run(examinations, meter.name)]
        extra = base.findings(tools) if base else []
        if base and lock_path is not None:
            extra += base.lock_changes(lock_path, lock)
        if base and meter.simulation is not None and (lock_path is None or (trouble and not update)):
            extra += base.bytes_findings(examinations, tools)
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
        if not update or (lock_path and lock_path.exists()):  # else a note says why none was written
            extra = [*extra, Finding("lock", "gate", "", "fail", trouble)]
    if whole and lock_speaks:
        extra = [*extra, *_ops_only_in_lock(lock, examinations)]
    return judge(
        examinations, lock=lock if lock_speaks else None,
        peaks=read_peaks(peaks_path(lock_path)) if lock_path else {},
        meter=meter.name, notes=notes, extra=extra, surroundings=describe(),
    )  # fmt: skip


def _read_lock(path: Path, *, rewrites: bool) -> tuple[dict[Key, int], str]:
    """Return the entries, and a message if there are none to judge by. A lock that is rewritten whole may be broken."""
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


def _estimates(examinations: Sequence[Examination]) -> list[str]:
    """Return a note for each form and reason whose readings are estimates."""
    said = {
        f"{op}/{form}: an estimate: {note}": None
        for (op, form, _, _), reading in readings_by_key(examinations).items()
        if not reading.exact
        for note in reading.notes
    }
    return list(said)


def _not_run(examinations: Sequence[Examination], meter: str) -> list[str]:
    """Return a note for each form that does not fit the meter's GPU, with the bytes that it would take."""
    return [
        f"{op}/{form} [{case}] was not run: it would take {format_bytes(reading.peak_bytes)} above "
        f"{format_bytes(reading.base_bytes)} of inputs and does not fit this GPU; its bytes are simulated"
        for (op, form, case), reading in not_run(examinations, meter).items()
    ]


def _updated_lock(lock: dict[Key, int], examinations: Sequence[Examination], whole: bool) -> dict[Key, int]:
    """Return today's readings as entries. Entries of other ops stay, unless all ops were examined."""
    judged = {examination.op for examination in examinations}
    kept = {} if whole else {key: size for key, size in lock.items() if key[0] not in judged}
    return kept | {key: bytes_of(reading, key[3]) for key, reading in lockable_readings(examinations).items()}


def _updated_peaks(peaks: Peaks, lock: dict[Key, int], examinations: Sequence[Examination]) -> Peaks:
    """Return what is alive at today's peaks, for those entries of the lock that are peaks."""
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
