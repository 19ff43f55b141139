"""Fast: a form's time over naive's, the two interleaved in one process."""

from __future__ import annotations

from ..contract import NAIVE, Contract, Phase, SpeedBudget
from ..meters.clock import Race, race
from ..units import format_seconds
from .finding import Finding, Status
from .inputs import Draw, StepOf


def time_against_naive(contract: Contract, form: str, case: str, phase: Phase, device: str, pairs: int = 15) -> Race:
    steps = [StepOf(contract, f, Draw(contract.cases[case]), phase)(device) for f in (form, NAIVE)]
    return race(steps[0], steps[1], device=device, pairs=pairs)


def check_speed(contract: Contract, law: SpeedBudget, *, device: str, pairs: int = 15) -> Finding:
    result = time_against_naive(contract, law.form, law.case, law.phase, device, pairs)
    within = result.ratio <= law.times_naive
    message = (
        f"takes {result.ratio:.2f}x naive's time ({format_seconds(result.first_s)} against "
        f"{format_seconds(result.second_s)}), allowed {law.times_naive:g}x, {pairs} pairs on {device}"
    )
    status: Status = "pass" if within else "fail"
    return Finding("speed", contract.name, law.form, status, message, law.case, law.phase)
