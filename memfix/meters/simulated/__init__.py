"""The GPU-free meter: the step runs on fake tensors, and every storage's birth and death is counted.

Nothing is computed and no memory is taken, so a 100 GiB train step is measured on a laptop, and two
runs give the same bytes. Rooms: ``fake_device`` and ``plain_path`` (CUDA's paths in any torch), ``environment``,
``answers``, ``detours``, ``redirects`` and ``attention`` (user code believes in the GPU), ``tracking`` and ``engine``
(storages), ``composite``, ``workspace`` and ``tables`` (what kernels hide), ``assumptions`` and ``refusals`` (values
that are not there), ``ledger`` (the bytes), ``source_lines`` (who made them), ``gpus``.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

from ...units import format_bytes
from ..base import Reading, StepBuilder
from ..stages import listening, stages_of
from . import fake_device
from .gpus import get_gpu

if TYPE_CHECKING:
    from .tracking import StorageTracker


class SimulatedMeter:
    name = "simulated"

    def __init__(self, gpu: str = "H200") -> None:
        self.gpu = get_gpu(gpu)

    def unavailable_reason(self) -> str | None:
        return fake_device.unavailable_reason()

    def measure(self, build: StepBuilder, *, warmup: int = 1) -> Reading:
        from .environment import simulated_gpu
        from .refusals import said_in_words
        from .source_lines import line_of

        no_plain_path = fake_device.verdict().no_plain_path
        with simulated_gpu(self.gpu, plain_path=no_plain_path is None) as tracker, said_in_words():
            step = build("cuda")
            for _ in range(warmup):
                step()
            gc.collect()
            ledger = tracker.ledger
            ledger.restart()
            tracker.notes.clear()  # what hid in the warm-up is gone
            if warmup == 0:
                tracker.note("a first call: what libraries take once, such as cuBLAS its workspace, is not counted")
            with listening(ledger.mark):
                result = step()
            ledger.settle()
            requested, allocated = ledger.requested, ledger.allocated
            held_bytes = requested.live - requested.base
            peak_bytes, allocated_bytes = requested.peak - requested.base, allocated.peak - allocated.base
            base_bytes, timeline = requested.base, ledger.timeline(line_of)
            _note_cycles(tracker)
            del result
            gc.collect()
            leaked_bytes = requested.live - requested.base
            notes = (*([no_plain_path] if no_plain_path else []), *tracker.notes)
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
            alive_at_peak=timeline.at_peak(),
            stages=stages_of(timeline),
            timeline=timeline,
        )


def _note_cycles(tracker: StorageTracker) -> None:
    """Memory that only Python's cycle collector frees is freed at a moment that differs from run to run."""
    before = tracker.ledger.requested.live
    gc.collect()
    freed = before - tracker.ledger.requested.live
    if freed:
        tracker.note(f"{format_bytes(freed)} were held by reference cycles until the collector ran, whenever that is")
