"""Which lines of the forms a check runs, and which of their names hold tensors."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any


@dataclass
class Watched:
    """By file: lines that ran, and local names that held a tensor (:data:`memfix.selftest.text.TensorNames`)."""

    lines: dict[str, set[int]] = field(default_factory=dict)
    tensors: dict[str, dict[tuple[int, str], bool]] = field(default_factory=dict)


@contextlib.contextmanager
def watching(paths: Collection[str]) -> Iterator[Watched]:
    import torch

    found = Watched({path: set() for path in paths}, {path: {} for path in paths})

    def within(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        path = code.co_filename
        found.lines[path].add(frame.f_lineno)
        names = found.tensors[path]
        for name, value in frame.f_locals.items():
            if isinstance(value, torch.Tensor):
                key = (code.co_firstlineno, name)
                names[key] = names.get(key, False) or value.is_floating_point()
        return within

    def at_call(frame: FrameType, event: str, argument: Any) -> Any:
        return within if frame.f_code.co_filename in found.lines else None

    before = sys.gettrace()
    sys.settrace(at_call)
    threading.settrace(at_call)
    try:
        yield found
    finally:
        sys.settrace(before)
        threading.settrace(None)
