"""Records the history of torch's CUDA allocator with Python frames, and reports allocations that fail.

:mod:`memfix.meters.recorded` interprets the recorded snapshots.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from .recorded import STAGES, Frames, Moment, Snapshot

FailureListener = Callable[[Snapshot, Moment], None]
"""A function that is called when an allocation fails, before torch raises."""


class CudaHistory:
    """The allocator's history of all GPUs of this process. Only one can be recorded at a time."""

    _recording: CudaHistory | None = None
    _is_observing = False

    def __init__(self, device: int, max_entries: int, on_failure: FailureListener) -> None:
        self._device, self._max_entries, self._on_failure = device, max_entries, on_failure
        self._thread = threading.get_ident()
        self._stages: list[dict[str, Any]] = []

    def __enter__(self) -> CudaHistory:
        import torch

        if torch._C._cuda_isHistoryEnabled():
            raise UsageError(
                "the allocator's history is being recorded already; end that by "
                "torch.cuda.memory._record_memory_history(None), or use memfix.watch(lines=False), which records none"
            )
        self.restart()
        CudaHistory._recording = self
        _observe_failures()
        return self

    def restart(self) -> None:
        """Drop the history so far, except the current stage. Live blocks keep the frames of their allocation."""
        import torch

        del self._stages[:-1]
        torch.cuda.memory._record_memory_history(
            "all", context="alloc", stacks="python", max_entries=self._max_entries, clear_history=True
        )

    def __exit__(self, *exception: object) -> None:
        import torch

        CudaHistory._recording = None
        torch.cuda.memory._record_memory_history(None)

    def enter_stage(self, name: str | None) -> None:
        """Begin a stage: later entries of the history belong to it."""
        self._stages.append({"time_us": time.time_ns() // 1000, "name": name})

    def snapshot(self) -> Snapshot:
        import torch

        return {**torch.cuda.memory._snapshot(), STAGES: tuple(self._stages)}

    def failed(self, device: int, capacity_bytes: int) -> None:
        """Call the listener, in the thread whose allocation has just failed."""
        import torch

        if device == self._device:
            node: Any = torch._C._current_autograd_node()
            moment = Moment(_frames_of_thread(self._thread), node.name() if node else None, capacity_bytes)
            self._on_failure(self.snapshot(), moment)


def _observe_failures() -> None:
    """Attach one observer for the life of the process: torch cannot detach it. It does nothing between recordings."""
    import torch

    if not CudaHistory._is_observing:
        CudaHistory._is_observing = True
        torch._C._cuda_attach_out_of_memory_observer(_observer)  # type: ignore[attr-defined]


def _observer(device: int, _asked_bytes: int, capacity_bytes: int, _free_bytes: int) -> None:
    history = CudaHistory._recording
    if history is not None:
        history.failed(device, capacity_bytes)


def _frames_of_thread(identity: int) -> Frames:
    frame = sys._current_frames().get(identity)
    stack = traceback.walk_stack(frame) if frame is not None else ()
    return [{"filename": f.f_code.co_filename, "line": line, "name": f.f_code.co_name} for f, line in stack]
