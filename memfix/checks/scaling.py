"""How the peak grows when one dim is doubled, far beyond every case: the exponent over the upper half of the sizes."""

from __future__ import annotations

import math
from dataclasses import replace

from ..contract import Contract
from ..laws import Scaling
from ..meters.base import Meter
from ..units import format_bytes
from .finding import Finding, Status
from .form_call import FormCall
from .inputs import Draw
from .measured import Growth
from .measuring import measure_phases, with_lines
from .phase_bytes import bytes_of

TOLERATED_EXCESS = 0.05


def check_scaling(contract: Contract, law: Scaling, meter: Meter) -> Finding:
    """Measure the form at two sizes of the law's dim, and judge the exponent between them."""
    case = contract.cases[law.case]
    # in the lower half constants hide the growth; the two ends of the upper half give its slope
    sizes = [case.dims[law.dim] << ((law.doublings + 1) // 2), case.dims[law.dim] << law.doublings]
    draws = [Draw(replace(case, dims={**case.dims, law.dim: size})) for size in sizes]
    calls = [FormCall(contract, law.form, draw) for draw in draws]
    readings = [measure_phases(call, [law.phase], meter)[law.phase] for call in calls]
    peaks = [bytes_of(reading, law.phase) for reading in readings]
    grain = readings[0].granularity_bytes  # below it bytes are no growth
    exponent = math.log(max(grain, peaks[1]) / max(grain, peaks[0])) / math.log(sizes[1] / sizes[0])
    holds = exponent <= law.at_most + TOLERATED_EXCESS
    message = (
        f"grows like {law.dim}^{exponent:.2f} from {law.dim}={sizes[0]} ({format_bytes(peaks[0])}) to {sizes[-1]} "
        f"({format_bytes(peaks[-1])}), allowed {law.dim}^{law.at_most:g}, meter {readings[0].meter}"
    )
    details: tuple[str, ...] = ()
    if not holds:
        details = tuple(f"  {line}" for line in with_lines(calls[-1], law.phase, readings[-1]).table_lines(4))
    status: Status = "pass" if holds else "fail"
    return Finding(
        "scaling", contract.name, law.form, status, message, law.case, law.phase, details, measured=Growth(exponent)
    )
