"""How the peak grows: the exponent over a series that doubles one dim, far past every case."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ..contract import Contract
from ..laws import Scaling
from ..meters.base import Meter
from ..units import format_bytes
from .finding import Finding, Status
from .memory import bytes_of, measure_phases

TOLERATED_EXCESS = 0.05


def fitted_exponent(sizes: Sequence[int], peaks: Sequence[int]) -> float:
    """The slope of log peak over log size, by least squares."""
    xs = [math.log2(size) for size in sizes]
    ys = [math.log2(max(1, peak)) for peak in peaks]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    return sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread


def check_scaling(contract: Contract, law: Scaling, meter: Meter) -> Finding:
    from .inputs import Draw

    case = contract.cases[law.case]
    # the upper half of the series: below it constants hide the growth
    sizes = [case.dims[law.dim] << k for k in range((law.doublings + 1) // 2, law.doublings + 1)]
    peaks, readings = [], []
    for size in sizes:
        grown = replace(case, dims={**case.dims, law.dim: size})
        readings.append(measure_phases(contract, law.form, Draw(grown), [law.phase], meter)[law.phase])
        peaks.append(bytes_of(readings[-1], law.phase))
    exponent = fitted_exponent(sizes, peaks)
    holds = exponent <= law.at_most + TOLERATED_EXCESS
    message = (
        f"grows like {law.dim}^{exponent:.2f} from {law.dim}={sizes[0]} ({format_bytes(peaks[0])}) to {sizes[-1]} "
        f"({format_bytes(peaks[-1])}), allowed {law.dim}^{law.at_most:g}, meter {readings[0].meter}"
    )
    details: tuple[str, ...] = ()
    if not holds:
        series = ", ".join(f"{size}: {format_bytes(peak)}" for size, peak in zip(sizes, peaks, strict=True))
        details = (f"  {law.dim} -> peak   {series}", *(f"  {line}" for line in readings[-1].table_lines(4)))
    status: Status = "pass" if holds else "fail"
    return Finding(
        "scaling",
        contract.name,
        law.form,
        status,
        message,
        law.case,
        law.phase,
        details,
        figures={"exponent": exponent},
    )
