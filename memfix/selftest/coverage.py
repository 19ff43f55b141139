"""Records the line coverage of the forms while checks run, and which of their local names hold tensors."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch


@dataclass
class Coverage:
    """For each file, the lines that ran and the local names that held a tensor
    (:data:`memfix.selftest.source.TensorNames`); and how long the run took."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    tensors: dict[str, dict[tuple[int, str], bool]] = field(default_factory=dict)
    seconds: float = 0.0


@contextlib.contextmanager
def line_coverage(paths: Collection[str]) -> Iterator[Coverage]:
    coverage = Coverage({path: set() for path in paths}, {path: {} for path in paths})

    def trace_line(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        coverage.lines[code.co_filename].add(frame.f_lineno)
        names = coverage.tensors[code.co_filename]
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                key = (code.co_firstlineno, name)
                names[key] = names.get(key, False) or value.is_floating_point()
        return trace_line

    def trace_call(frame: FrameType, event: str, argument: Any) -> Any:
        return trace_line if frame.f_code.co_filename in coverage.lines else None

    before, start = sys.gettrace(), time.monotonic()
    sys.settrace(trace_call)
    threading.settrace(trace_call)
    try:
        yield coverage
    finally:
        sys.settrace(before)
        threading.settrace(None)
        coverage.seconds = time.monotonic() - start
