"""Checks that only a GPU can answer: from figures that were measured on one and are kept with the project."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ...claims import H200_RESULTS, Found
from .evidence import Evidence

SPEED_FILE = H200_RESULTS / "kda.json"
NOT_MEASURED = "not measured yet: python -m benchmarks.kda on a GPU"
H200 = "measured on the H200"
PHASES = ("forward", "train")
NOISE = 1.05  # two times of one form differ as much


def _measured(key: str) -> Any:
    """What the benchmark wrote under ``key``, or None."""
    return json.loads(SPEED_FILE.read_text(encoding="utf-8")).get(key) if SPEED_FILE.is_file() else None


def smaller_chunks_are_slower(evidence: Evidence) -> Found:
    """KDA-24: streamed in chunks of 32, 64 and 128, forward and train."""
    by_chunk = _measured("streamed_by_chunk")
    if by_chunk is None:
        return Found(None, "", elsewhere=NOT_MEASURED)
    times = {phase: [by_chunk[size][f"{phase}_ms"] for size in ("32", "64", "128")] for phase in PHASES}
    figures: dict[str, int | str] = {
        phase: " / ".join(f"{value:.3g} ms" for value in of_phase) for phase, of_phase in times.items()
    }
    figures["phases"] = len(times)
    falls = all(NOISE * one >= other for of_phase in times.values() for one, other in itertools.pairwise(of_phase))
    return Found(falls, H200, figures)


def slower_by_5_percent(evidence: Evidence) -> Found:
    """KDA-28: streamed in chunks of 64 over dense, in pairs; about 5 % is what rounds to 3 to 7."""
    overhead = _measured("overhead")
    if overhead is None:
        return Found(None, "", elsewhere=NOT_MEASURED)
    slower = {
        phase: {name: 100 * (overhead[phase][name] - 1) for name in ("median", "low", "high")} for phase in PHASES
    }
    figures: dict[str, int | str] = {
        phase: f"{of_phase['median']:+.0f} % ({of_phase['low']:+.0f} to {of_phase['high']:+.0f})"
        for phase, of_phase in slower.items()
    }
    figures["phases"] = len(slower)
    return Found(all(3 <= round(of_phase["median"]) <= 7 for of_phase in slower.values()), H200, figures)


CHECKS = {check.__name__: check for check in (smaller_chunks_are_slower, slower_by_5_percent)}
