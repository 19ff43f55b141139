"""Checks that only a GPU can answer: from figures that were measured on one and are kept with the project."""

from __future__ import annotations

import itertools
import json
from typing import Any

from ...claims import H200_RESULTS, Found
from .evidence import Evidence

SPEED_FILE = H200_RESULTS / "kda_chunks.json"
NOT_MEASURED = "not measured yet: python -m benchmarks.compare kda --table chunks on a GPU"
H200 = "measured on the H200"
PHASES = ("forward", "train")
NOISE = 1.05  # two times of one form differ as much


def _streamed_by_chunk() -> dict[int, dict[str, Any]]:
    """By chunk size and phase what the benchmark measured of the streamed form; empty before it has."""
    if not SPEED_FILE.is_file():
        return {}
    entries = json.loads(SPEED_FILE.read_text(encoding="utf-8")).get("speed", [])
    return {
        entry["dims"]["chunk_size"]: {phase: of["rows"]["streamed"] for phase, of in entry["phases"].items()}
        for entry in entries
    }


def smaller_chunks_are_slower(evidence: Evidence) -> Found:
    """KDA-24: streamed in chunks of 32, 64 and 128, forward and train."""
    by_chunk = _streamed_by_chunk()
    if not by_chunk:
        return Found(None, "", elsewhere=NOT_MEASURED)
    times = {phase: [1e3 * by_chunk[size][phase]["seconds"] for size in (32, 64, 128)] for phase in PHASES}
    figures: dict[str, int | str] = {
        phase: " / ".join(f"{value:.3g} ms" for value in of_phase) for phase, of_phase in times.items()
    }
    figures["phases"] = len(times)
    falls = all(NOISE * one >= other for of_phase in times.values() for one, other in itertools.pairwise(of_phase))
    return Found(falls, H200, figures)


def slower_by_5_percent(evidence: Evidence) -> Found:
    """KDA-28: streamed in chunks of 64 over dense, in pairs; about 5 % is what rounds to 3 to 7."""
    by_chunk = _streamed_by_chunk()
    if not by_chunk:
        return Found(None, "", elsewhere=NOT_MEASURED)
    overhead = {phase: by_chunk[64][phase]["pairs_over_naive"] for phase in PHASES}
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
