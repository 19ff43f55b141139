"""Checks that only a GPU can answer: from figures that were measured on one and are kept with the project."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...claims import H200_RESULTS, Found
from .evidence import Evidence

SPEED_FILE = H200_RESULTS / "speed.json"
SPEED_COMMAND = "memfix check linear_cross_entropy --speed --device cuda"


def slower_by_5_to_10_percent(evidence: Evidence) -> Found:
    """LOG-54: the reported loop's time over naive's, interleaved in one process, at each case that was timed."""
    ratios = _ratios(SPEED_FILE)
    if not ratios:
        return Found(None, "", elsewhere=f"needs a GPU: {SPEED_COMMAND}")
    slower = {case: 100 * (ratio - 1) for case, ratio in ratios.items()}
    figures: dict[str, int | str] = {case: f"{percent:+.0f} %" for case, percent in slower.items()}
    figures["cases"] = len(slower)
    return Found(all(5 <= round(percent) <= 10 for percent in slower.values()), "measured on the H200", figures)


def _ratios(path: Path) -> dict[str, float]:
    if not path.is_file():
        return {}
    findings: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["findings"]
    return {
        found["case"]: found["figures"]["ratio"]
        for found in findings
        if (found["check"], found["op"], found["form"]) == ("speed", "linear_cross_entropy", "reported")
    }


CHECKS = {slower_by_5_to_10_percent.__name__: slower_by_5_to_10_percent}
