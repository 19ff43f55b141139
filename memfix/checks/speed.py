"""Fast: the ratio of a form's time to naive's, the two timed alternately in one process."""

from __future__ import annotations

from ..contract import Contract
from ..laws import NAIVE, SpeedBudget
from ..meters.clock import race
from .finding import Finding, Status
from .inputs import Draw, StepOf
from .measured import Ratio


def check_speed(contract: Contract, law: SpeedBudget, *, pairs: int = 15) -> Finding:
    """Time the form and naive alternately, at the law's case and on its device."""
    draw = Draw(contract.cases[law.case])
    form, naive = (StepOf(contract, f, draw, law.phase)(law.device) for f in (law.form, NAIVE))
    result = race(form, naive, device=law.device, pairs=pairs)
    measured = Ratio(result.ratio, result.second_s, "naive", law.times_naive, result.pairs)
    message = measured.message("naive's time", law.device)
    status: Status = "pass" if result.ratio <= law.times_naive else "fail"
    return Finding("speed", contract.name, law.form, status, message, law.case, law.phase, measured=measured)
