"""Fast: a form's time over naive's, the two interleaved in one process."""

from __future__ import annotations

from dataclasses import asdict

from ..contract import Contract
from ..laws import NAIVE, SpeedBudget
from ..meters.clock import race
from ..units import format_seconds
from .finding import Finding, Status
from .inputs import Draw, StepOf


def check_speed(contract: Contract, law: SpeedBudget, *, pairs: int = 15) -> Finding:
    """Time the form and naive in turn, where the law says."""
    draw = Draw(contract.cases[law.case])
    form, naive = (StepOf(contract, f, draw, law.phase)(law.device) for f in (law.form, NAIVE))
    result = race(form, naive, device=law.device, pairs=pairs)
    within = result.ratio <= law.times_naive
    message = (
        f"takes {result.ratio:.2f}x naive's time ({format_seconds(result.first_s)} against "
        f"{format_seconds(result.second_s)}), allowed {law.times_naive:g}x, {pairs} pairs on {law.device}"
    )
    status: Status = "pass" if within else "fail"
    return Finding("speed", contract.name, law.form, status, message, law.case, law.phase, figures=asdict(result))
