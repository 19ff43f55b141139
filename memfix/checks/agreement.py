"""Compare the simulated meter's bytes with the allocator's on a real GPU, for the same steps."""

from __future__ import annotations

from collections.abc import Iterator

from ..meters.base import Meter
from ..meters.cuda import CudaMeter
from ..meters.gpu_sharing import gpu_beside_others
from .finding import Finding
from .form_call import FormCall
from .measured import Agreement
from .measuring import measure_phases
from .memory import bytes_of, explained


def check_agreement(call: FormCall, simulated: Meter) -> Iterator[Finding]:
    """Yield one finding for each phase, or none where this GPU cannot hold the case."""
    predicted = measure_phases(call, call.phases, simulated)
    expected_bytes = max(reading.total_bytes for reading in predicted.values())
    gpu = CudaMeter(expected_bytes)
    with gpu_beside_others():  # reserved once for all phases, since it waits for processes that time a step
        if expected_bytes > gpu.capacity_bytes():
            return
        real = measure_phases(call, call.phases, gpu)
    for phase, reading in predicted.items():
        measured = Agreement(bytes_of(reading, phase), bytes_of(real[phase], phase))
        message = f"simulated {measured.simulated_bytes:,} bytes, allocator {measured.allocator_bytes:,}"
        message += f": {measured.simulated_bytes - measured.allocator_bytes:+,}"
        if not reading.exact:
            message += f" (an estimate: {'; '.join(reading.notes)})"
        is_wrong = reading.exact and measured.simulated_bytes != measured.allocator_bytes
        details = explained(reading, phase) if is_wrong else ()
        yield call.finding(
            "agreement", "fail" if is_wrong else "pass", message, phase, details=details, measured=measured
        )
