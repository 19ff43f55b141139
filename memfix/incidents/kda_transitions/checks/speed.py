"""Checks of claims about the time that the fix costs, from times measured on an H200."""

from __future__ import annotations

import itertools
from typing import Any

from ...judging import ON_H200, CheckResult, check, holds_if
from . import Evidence

PHASES = ("forward", "train")


def _streamed_by_chunk(evidence: Evidence) -> dict[int, dict[str, Any]]:
    """The recorded times of the streamed form, by chunk size and phase."""
    return {
        entry["dims"]["chunk_size"]: {phase: of["rows"]["streamed"] for phase, of in entry["phases"].items()}
        for entry in evidence.comparison("kda", "chunks")
    }


@check("KDA-24")
def smaller_chunks_are_slower(evidence: Evidence) -> CheckResult:
    """Compare the times of the streamed form in chunks of 32, 64 and 128, in forward and in training.

    They contradict the claim where every time in smaller chunks is below every time in larger ones.
    """
    by_chunk = _streamed_by_chunk(evidence)
    rows = {phase: [by_chunk[size][phase] for size in (32, 64, 128)] for phase in PHASES}
    figures = {
        phase: " / ".join(f"{1e3 * row['seconds']:.3g} ms" for row in of_phase) for phase, of_phase in rows.items()
    }
    falls = all(
        max(one["times_s"]) >= min(other["times_s"])
        for of_phase in rows.values()
        for one, other in itertools.pairwise(of_phase)
    )
    return holds_if(falls, ON_H200, **figures, phases=len(rows))


@check("KDA-28")
def slower_by_5_percent(evidence: Evidence) -> CheckResult:
    """Compare the streamed form in chunks of 64 with naive, timed in pairs. About 5 % is read as 3 to 7."""
    streamed = _streamed_by_chunk(evidence)[64]
    overhead = {phase: streamed[phase]["pairs_over_naive"] for phase in PHASES}
    slower = {
        phase: {name: 100 * (overhead[phase][name] - 1) for name in ("median", "low", "high")} for phase in PHASES
    }
    figures = {
        phase: f"{of_phase['median']:+.0f} % ({of_phase['low']:+.0f} to {of_phase['high']:+.0f})"
        for phase, of_phase in slower.items()
    }
    about_5 = all(3 <= round(of_phase["median"]) <= 7 for of_phase in slower.values())
    return holds_if(about_5, ON_H200, **figures, phases=len(slower))
