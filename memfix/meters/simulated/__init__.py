"""The GPU-free meter: the step runs on fake tensors, and every storage's birth and death is counted.

Nothing is computed and no memory is taken, so a 100 GiB train step is measured on a laptop, and two
runs give the same bytes. Rooms: ``fake_device`` (fake CUDA in any torch), ``environment`` (user code believes in
the GPU), ``tracking`` (storages), ``engine`` (autograd's in-place additions), ``composite`` and ``workspace`` (what
kernels hide), ``ledger`` (the bytes), ``source_lines`` (who made them).
"""

from __future__ import annotations

import contextlib
import gc
import re
from typing import Any

from ...errors import MeasurementError
from ..base import Reading, StepBuilder
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
        from .source_lines import line_of

        no_plain_path = fake_device.verdict().no_plain_path
        with simulated_gpu(self.gpu, plain_path=no_plain_path is None) as tracker, _readable_errors():
            step = build("cuda")
            for _ in range(warmup):
                step()
            gc.collect()
            ledger = tracker.ledger
            ledger.restart()
            tracker.notes.clear()  # what hid in the warm-up is gone
            result = step()
            ledger.settle()
            requested, allocated = ledger.requested, ledger.allocated
            held_bytes = requested.live - requested.base
            peak_bytes, allocated_bytes = requested.peak - requested.base, allocated.peak - allocated.base
            base_bytes, timeline = requested.base, ledger.timeline(line_of)
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
            timeline=timeline,
        )


@contextlib.contextmanager
def _readable_errors() -> Any:
    """What fake tensors cannot do, said in the user's terms."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise MeasurementError(
            f"the step needs the values of a tensor ({error.func}){_at(error)}, and simulated tensors have none; "
            "avoid .item() and data-dependent shapes in it, or measure with --meter=cuda"
        ) from error
    except (UnsupportedOperatorException, UnsupportedFakeTensorException) as error:
        raise MeasurementError(
            f"the step uses what cannot be simulated ({error}){_at(error)}; register a fake for it, or measure with "
            "--meter=cuda"
        ) from error
    except NotImplementedError as error:
        said = str(error).splitlines()[0][:200]
        raise MeasurementError(
            f"the step uses what cannot be simulated{_at(error)}: {said}; measure with --meter=cuda"
        ) from error
    except RuntimeError as error:
        if not re.search("two (different )?devices", str(error)):
            raise
        said = str(error).splitlines()[0]
        raise MeasurementError(f"tensors of two devices meet in one operator{_at(error)}: {said}") from error


def _at(error: BaseException) -> str:
    """The user's line behind an error: `` at loss.py:41``."""
    from .source_lines import user_line

    line = user_line(error)
    return f" at {line.place}" if line is not None else ""
