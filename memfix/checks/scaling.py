"""Measure and judge how the peak grows when dims are doubled far beyond every case."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..contract import Contract
from ..laws import Scaling
from ..meters.base import Meter, Reading
from ..units import format_bytes
from .finding import Finding, Status
from .form_call import FormCall
from .inputs import Draw
from .measured import Growth
from .measuring import measure_phases
from .memory import bytes_of, with_lines

TOLERATED_EXCESS = 0.05


@dataclass(frozen=True)
class Grown:
    """A form measured at two sizes, and the exponent between them."""

    calls: list[FormCall]
    readings: list[Reading]
    exponent: float

    def holds(self, law: Scaling) -> bool:
        return self.exponent <= law.at_most + TOLERATED_EXCESS


def measure_growth(contract: Contract, law: Scaling, meter: Meter) -> Grown:
    """Measure the form at two sizes of the law's dims."""
    case = contract.cases[law.case]
    # in the lower half constants hide the growth; the two ends of the upper half give its slope
    doublings = ((law.doublings + 1) // 2, law.doublings)
    sizes = [{dim: case.dims[dim] << times for dim in law.dims} for times in doublings]
    calls = [FormCall(contract, law.form, Draw(replace(case, dims={**case.dims, **size}))) for size in sizes]
    readings = [measure_phases(call, [law.phase], meter)[law.phase] for call in calls]
    grain = readings[0].granularity_bytes  # smaller differences are no growth
    first, last = (max(grain, bytes_of(reading, law.phase)) for reading in readings)
    return Grown(calls, readings, math.log2(last / first) / (doublings[1] - doublings[0]))


def check_scaling(contract: Contract, law: Scaling, meter: Meter) -> Finding:
    """Judge the exponent by which a form's peak grows."""
    grown = measure_growth(contract, law, meter)
    calls, readings, exponent, holds = grown.calls, grown.readings, grown.exponent, grown.holds(law)
    peaks = [bytes_of(reading, law.phase) for reading in readings]
    first, last = (", ".join(f"{dim}={call.draw.case.dims[dim]}" for dim in law.dims) for call in calls)
    message = (
        f"grows like {law.power(f'{exponent:.2f}')} from {first} ({format_bytes(peaks[0])}) to {last} "
        f"({format_bytes(peaks[-1])}), allowed {law.power(f'{law.at_most:g}')}, meter {readings[0].meter}"
    )
    details: tuple[str, ...] = ()
    if not holds:
        details = tuple(f"  {line}" for line in with_lines(calls[-1], law.phase, readings[-1]).table_lines(4))
    status: Status = "pass" if holds else "fail"
    return Finding(
        "scaling", contract.name, law.form, status, message, law.case, law.phase, details, measured=Growth(exponent)
    )
