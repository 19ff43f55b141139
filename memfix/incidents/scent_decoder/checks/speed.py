"""Checks of claims about the time that the solutions cost, from steps timed on an H200."""

from __future__ import annotations

import statistics

from ....units import format_times
from ...judging import ON_H200, CheckResult, check, holds_if, matches_figure
from ..incident import BATCH_16
from . import Evidence
from .steps import BATCH, CHECKPOINT, ORIGINAL


@check("SCN-29")
def a_quarter_at_a_time(evidence: Evidence) -> CheckResult:
    """Divide the time per image at batch 16 by that at batch 64."""
    steps = evidence.config().batch_size // evidence.config(BATCH_16).batch_size
    ratios = [steps * ratio for ratio in _ratios(evidence, BATCH)]
    low, per_image, high = (f"{ratio:.2f}x" for ratio in ratios)
    return matches_figure(
        ON_H200, *ratios, steps=steps, per_image=per_image, low=low, high=high, **_steps(evidence, BATCH)
    )


@check("SCN-32")
def slower_by_30_percent(evidence: Evidence) -> CheckResult:
    """Compare a checkpointed step with the original, of as many images. About 30 % is read as 25 to 35."""
    low, slower, high = (100 * (ratio - 1) for ratio in _ratios(evidence, CHECKPOINT))
    figures = {"slower": f"{slower:.1f} %", "low": f"{low:.1f} %", "high": f"{high:.1f} %"}
    images = evidence.config().batch_size
    return holds_if(low >= 25 and high < 35, ON_H200, images=images, **figures, **_steps(evidence, CHECKPOINT))


def _ratios(evidence: Evidence, name: str) -> tuple[float, float, float]:
    """The time of a step over the original's: the lowest ratio of samples, the ratio of the medians, the highest."""
    of_run, original = evidence.run_times_s(name), evidence.run_times_s(ORIGINAL)
    medians = statistics.median(of_run) / statistics.median(original)
    return of_run[0] / original[-1], medians, of_run[-1] / original[0]


def _steps(evidence: Evidence, name: str) -> dict[str, str]:
    """The times of a step and of the original's, with their spread."""
    times = {"step": evidence.run_times_s(name), "original": evidence.run_times_s(ORIGINAL)}
    return {key: format_times(statistics.median(times_s), times_s) for key, times_s in times.items()}
