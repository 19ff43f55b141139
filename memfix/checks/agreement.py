"""Is the simulated meter right? Its bytes against the allocator's on a real GPU, for the same step."""

from __future__ import annotations

from ..contract import Contract
from ..laws import Phase
from ..meters.base import Meter
from ..meters.cuda import CudaMeter
from .finding import Finding, Status
from .inputs import Draw
from .memory import bytes_of, explained, measure


def check_agreement(contract: Contract, form: str, case: str, phase: Phase, simulated: Meter) -> Finding:
    draw = Draw(contract.cases[case])
    predicted = measure(contract, form, draw, phase, simulated)
    real = measure(contract, form, draw, phase, CudaMeter())
    said, found = bytes_of(predicted, phase), bytes_of(real, phase)
    figures = {"simulated_bytes": said, "allocator_bytes": found}
    status: Status = "pass" if said == found or not predicted.exact else "fail"
    message = f"simulated {said:,} bytes, allocator {found:,}: {said - found:+,}"
    if not predicted.exact:
        message += f" (an estimate: {'; '.join(predicted.notes)})"
    details = explained(predicted) if status == "fail" else ()
    return Finding("agreement", contract.name, form, status, message, case, phase, details, figures=figures)
