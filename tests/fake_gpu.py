"""A stand-in for torch's CUDA allocator: it counts and records as the real one does, and takes no memory."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import os
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch

from memfix.watch import watching

NAME = "NVIDIA Fake"
_COUNTS = ("requested", "allocated", "reserved")
_ROUNDING = 512


BACKWARD = """
def backward(self, work):
    running, results = self._start_thread(work)
    running.acquire()
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]
"""


def _in_file_of_torch(source: str, name: str) -> Callable[..., Any]:
    """A function whose frames look like torch's own."""
    names: dict[str, Any] = {}
    exec(compile(source, f"{os.path.dirname(torch.__file__)}/autograd/graph.py", "exec"), names)
    return names[name]


class FakeGpu:
    """The functions of ``torch.cuda`` that a watch calls, for one device with ``capacity`` bytes."""

    in_backward = _in_file_of_torch(BACKWARD, "backward")
    """Run work as autograd does: in a thread of its own, without Python frames, while this one waits."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.live: dict[int, dict[str, Any]] = {}
        self.peak = dict.fromkeys(_COUNTS, 0)
        self.trace: list[dict[str, Any]] = []
        self.recording: dict[str, Any] | None = None
        self.observers: list[Callable[..., None]] = []
        self.snapshots = 0
        self._autograd = 0
        self._microseconds = itertools.count(1)
        self._addresses = itertools.count(0x7F00_0000_0000, 1 << 30)

    # ---------------------------------------------------------------- what a program does
    def take(self, size: int) -> int:
        """Allocate, from the line that calls this."""
        frames = self._frames()
        if self.current("allocated") + size > self.capacity:
            self._record("oom", size, frames, device_free=self.capacity - self.current("allocated"))
            for observer in self.observers:
                observer(0, size, self.capacity, self.capacity - self.current("allocated"))
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        address = next(self._addresses)
        self.live[address] = {"size": size, "frames": frames}
        self._record("alloc", size, frames, addr=address)
        for count in _COUNTS:
            self.peak[count] = max(self.peak[count], self.current(count))
        return address

    def drop(self, *addresses: int) -> None:
        for address in addresses:
            size = self.live.pop(address)["size"]
            self._record("free_requested", size, [], addr=address)
            self._record("free_completed", size, [], addr=address)

    def _start_thread(self, work: Callable[[], Any]) -> tuple[threading.Lock, list[Any]]:
        results: list[Any] = []
        running = threading.Lock()
        running.acquire()

        def run() -> None:
            self._autograd = threading.get_ident()
            try:
                results.append(work())
            except BaseException as error:
                results.append(error)
            running.release()

        _thread.start_new_thread(run, ())  # unlike Thread.start, it does not wait in a Python frame
        return running, results

    def current(self, count: str) -> int:
        sizes = [block["size"] for block in self.live.values()]
        return sum(sizes if count == "requested" else map(_rounded, sizes))

    # ---------------------------------------------------------------- what torch has
    def install(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(watching, "gpu_unavailable_reason", lambda: None)
        cuda: dict[str, Any] = {
            "init": lambda: None,
            "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(),
            "get_device_name": lambda device: NAME,
            "memory_stats": self._stats,
            "reset_peak_memory_stats": self._reset_peak,
        }
        for name, function in cuda.items():
            patch.setattr(torch.cuda, name, function)
        memory = torch.cuda.memory
        patch.setattr(memory, "_record_memory_history", self._set_recording)
        patch.setattr(memory, "_snapshot", self._snapshot)
        patch.setattr("memfix.meters.cuda_history.time", self)
        patch.setattr(torch._C, "_cuda_isHistoryEnabled", lambda: self.recording is not None, raising=False)
        patch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", self.observers.append, raising=False)
        patch.setattr("memfix.meters.cuda_history.CudaHistory._is_observing", False)
        patch.setattr(watching.Watch, "_active", None)

    def time_ns(self) -> int:
        return 1000 * next(self._microseconds)

    def _stats(self, device: int | None = None) -> dict[str, int]:
        return {
            f"{count}_bytes.all.{point}": value
            for count in _COUNTS
            for point, value in (("current", self.current(count)), ("peak", self.peak[count]))
        }

    def _reset_peak(self, device: int | None = None) -> None:
        self.peak = {count: self.current(count) for count in _COUNTS}

    def _set_recording(self, enabled: str | None, clear_history: bool = False, **options: Any) -> None:
        self.recording = options if enabled else None
        if not enabled or clear_history:
            self.trace.clear()

    def _record(self, action: str, size: int, frames: list[Any], **fields: int) -> None:
        if self.recording is not None:
            entry = {"action": action, "size": size, "frames": frames, "time_us": self.time_ns() // 1000, **fields}
            self.trace = [*self.trace, entry][-self.recording["max_entries"] :]

    def _snapshot(self) -> dict[str, Any]:
        self.snapshots += 1
        blocks = [
            {"address": address, "size": _rounded(block["size"]), "requested_size": block["size"],
             "state": "active_allocated", "frames": block["frames"]}
            for address, block in self.live.items()
        ]  # fmt: skip
        active = sum(block["size"] for block in blocks)
        segment = {"device": 0, "total_size": active + _ROUNDING, "active_size": active, "blocks": blocks}
        return {"segments": [segment], "device_traces": [list(self.trace)]}

    def _frames(self) -> list[dict[str, Any]]:
        if self.recording is None or threading.get_ident() == self._autograd:
            return []
        stack = [(frame.f_code, line) for frame, line in traceback.walk_stack(None)]
        theirs = [(code, line) for code, line in stack if code.co_filename != __file__]
        return [{"filename": code.co_filename, "line": line, "name": code.co_name} for code, line in theirs]


def _rounded(size: int) -> int:
    return -(-size // _ROUNDING) * _ROUNDING
