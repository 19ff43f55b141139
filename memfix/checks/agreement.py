"""Is the simulated meter right? Its bytes against the allocator's on a real GPU, for the same steps."""

from __future__ import annotations

from ..contract import Contract
from ..laws import Phase
from ..meters.base import Meter, Reading
from ..meters.cuda import CudaMeter
from .finding import Finding, Status
from .inputs import Draw, phases_of
from .measured import Agreement
from .memory import bytes_of, explained, measure_phases, too_large_for


def check_agreement(contract: Contract, form: str, case: str, simulated: Meter) -> list[Finding]:
    """One finding for each phase; none where this GPU cannot hold the case."""
    draw, phases, gpu = Draw(contract.cases[case]), phases_of(contract), CudaMeter()
    if too_large_for(gpu, contract, form, draw, phases):
        return []
    predicted = measure_phases(contract, form, draw, phases, simulated)
    real = measure_phases(contract, form, draw, phases, gpu)
    return [_compared(contract, form, case, phase, predicted[phase], real[phase]) for phase in phases]


def _compared(contract: Contract, form: str, case: str, phase: Phase, predicted: Reading, real: Reading) -> Finding:
    simulated, allocated = bytes_of(predicted, phase), bytes_of(real, phase)
    status: Status = "pass" if simulated == allocated or not predicted.exact else "fail"
    message = f"simulated {simulated:,} bytes, allocator {allocated:,}: {simulated - allocated:+,}"
    if not predicted.exact:
        message += f" (an estimate: {'; '.join(predicted.notes)})"
    details = explained(predicted, phase) if status == "fail" else ()
    measured = Agreement(simulated, allocated)
    return Finding("agreement", contract.name, form, status, message, case, phase, details, measured=measured)
