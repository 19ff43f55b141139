"""The check of the claim about the time that the fix costs, from times measured on an H200."""

from __future__ import annotations

from ...claims import Quantity
from ...judging import ON_H200, CheckResult, check, holds_if
from .evidence import Evidence


@check("LOG-54")
def slower_by_5_to_10_percent(evidence: Evidence) -> CheckResult:
    """Compare the times of the reported loop and of naive, at each case that was timed."""
    slower = {case: ratio - 1 for case, ratio in evidence.speed_ratios("reported").items()}
    figures = {case: f"{100 * share:+.0f} %" for case, share in slower.items()}
    return holds_if(
        all(map(Quantity.parsed("5-10 %").is_met_by, slower.values())), ON_H200, **figures, cases=len(slower)
    )
