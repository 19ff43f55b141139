"""The GPU-free meter: the step runs on fake tensors, and every storage's birth and death is counted.

Nothing is computed and no memory is taken, so a 100 GiB train step is measured on a laptop, and two
runs give the same bytes. Rooms: ``fake_device`` (fake CUDA in any torch), ``environment`` (user code believes in
the GPU), ``tracking`` (storages), ``engine`` (autograd's in-place additions), ``composite`` and ``workspace`` (what
kernels hide), ``ledger`` (the bytes), ``source_lines`` (who made them).
"""

from __future__ import annotations

import contextlib
import gc
from typing import Any

from ...errors import MeasurementError
from ..base import Allocation, Reading, StepBuilder
from . import fake_device
from .gpus import get_gpu


class SimulatedMeter:
    name = "simulated"

    def __init__(self, gpu: str = "H200") -> None:
        self.gpu = get_gpu(gpu)

    def unavailable_reason(self) -> str | None:
        return fake_device.unavailable_reason()

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        from .environment import simulated_gpu

        with simulated_gpu(self.gpu) as tracker, _readable_errors():
            step = build("cuda")
            for _ in range(warmup):
                step()
            gc.collect()
            ledger = tracker.ledger
            ledger.restart()
            result = step()
            ledger.settle()
            requested, allocated = ledger.requested, ledger.allocated
            held_bytes = requested.live - requested.base
            peak_bytes, allocated_bytes = requested.peak - requested.base, allocated.peak - allocated.base
            base_bytes = requested.base
            del result
            gc.collect()
            leaked_bytes = requested.live - requested.base
            alive = _folded(ledger)
            notes = tuple(tracker.notes)
        return Reading(
            meter=self.name,
            device=self.gpu.name,
            peak_bytes=peak_bytes,
            base_bytes=base_bytes,
            held_bytes=held_bytes,
            leaked_bytes=leaked_bytes,
            allocated_bytes=allocated_bytes,
            exact=not notes,
            notes=notes,
            alive_at_peak=alive,
        )


def _folded(ledger: Any) -> tuple[Allocation, ...]:
    """What was alive at the peak, one row for each maker and line, largest first."""
    from .source_lines import spelled

    sums: dict[tuple[str, object], list[int]] = {}
    for entry in ledger.alive_at_peak():
        kept = ledger.peak_in_backward and not entry.in_backward
        what = entry.what.removeprefix("aten.").removesuffix(".default") + (", kept for backward" if kept else "")
        total = sums.setdefault((what, entry.site), [0, 0])
        total[0] += entry.bytes
        total[1] += 1
    rows = [Allocation(size, what, spelled(site), count) for (what, site), (size, count) in sums.items()]  # type: ignore[arg-type]
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.what, row.where)))


@contextlib.contextmanager
def _readable_errors() -> Any:
    """What fake tensors cannot do, said in the user's terms."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise MeasurementError(
            f"the step needs the values of a tensor ({error.func}), and simulated tensors have none; "
            "avoid .item() and data-dependent shapes in it, or measure with --meter=cuda"
        ) from error
