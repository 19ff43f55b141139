"""Judge the ratio of a form's time to naive's, timed alternately in one process."""

from __future__ import annotations

from ..contract import Contract
from ..laws import NAIVE, SpeedBudget
from ..meters.clock import race
from .finding import Finding, Status
from .form_call import FormCall
from .measured import Ratio

_ENOUGH_S, _MOST_S, _KNOWN_TO = 1.0, 4.0, 0.03
"""A race may end after one second if its ratio is known to 3 %, and ends after four: slow steps of naive are few."""
_RACES = 3
"""How often a form may race before it is too slow. What slows it down for good does so in every race; other processes
that keep the CPU busy need not, and the form with more to launch on a GPU suffers more from them."""


def check_speed(contract: Contract, law: SpeedBudget, *, pairs: int = 15) -> Finding:
    """Time the form and naive alternately, at the law's case and on its device."""
    call = FormCall.at_case(contract, law.form, law.case)
    form, naive = (each.step(law.phase)(law.device) for each in (call, call.of(NAIVE)))
    for _ in range(_RACES):
        result = race(
            form, naive, device=law.device, pairs=pairs, enough_s=_ENOUGH_S, most_s=_MOST_S, max_error=_KNOWN_TO
        )
        if result.ratio <= law.times_naive:
            break
    measured = Ratio(result.ratio, result.second_s, "naive", law.times_naive, result.pairs)
    message = measured.message("naive's time", law.device)
    status: Status = "pass" if result.ratio <= law.times_naive else "fail"
    return call.finding("speed", status, message, law.phase, measured=measured)
