"""Out-of-memory errors for steps that catch them. A step that does not is measured to its end, however large it is."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ...units import format_bytes
from ..timeline import METERS_FOLDER
from .source_lines import TORCH

_METER = str(Path(__file__).with_name("__init__.py"))
_NEARLY = 0.05
"""The share of the memory, below and above what there is, within which it is not known whether a step runs out."""
NOTE = "the step needs about as much memory as the GPU has, or more, and catches errors: where it runs out is not known"


def check(live_bytes: int, wanted_bytes: int, capacity_bytes: int) -> str | None:
    """Raise ``OutOfMemoryError`` if the GPU has too little memory and the step catches that error by its name.

    Returns a note if it may run out there and go on: near the capacity, or where it catches errors of any kind.
    """
    total = live_bytes + wanted_bytes
    if total < (1 - _NEARLY) * capacity_bytes:
        return None
    caught = [kind for frame in _frames_of_step() for kind in _caught_in(frame) if _catches(kind)]
    if not caught:
        return None
    if total > (1 + _NEARLY) * capacity_bytes and caught[0] is torch.OutOfMemoryError:
        raise torch.OutOfMemoryError(
            f"CUDA out of memory. Tried to allocate {format_bytes(wanted_bytes)}; the simulated GPU has"
            f" {format_bytes(capacity_bytes)}, of which {format_bytes(live_bytes)} are in use"
        )
    return NOTE


def _catches(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(torch.OutOfMemoryError, kind)


def _frames_of_step() -> Iterator[FrameType]:
    """The frames of the user's code, innermost first, up to the meter that calls the step."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _METER:
        if not frame.f_code.co_filename.startswith((TORCH, METERS_FOLDER)):
            yield frame
        frame = frame.f_back


def _caught_in(frame: FrameType) -> list[Any]:
    """The classes that the ``except`` clauses around a frame's current instruction name, innermost first."""
    parse: Any = getattr(dis, "_parse_exception_table", None)
    if parse is None or not frame.f_code.co_exceptiontable:
        return []
    ranges = parse(frame.f_code)
    instructions = {one.offset: number for number, one in enumerate(dis.get_instructions(frame.f_code))}
    listed = [*dis.get_instructions(frame.f_code)]
    found: list[Any] = []
    place, seen = frame.f_lasti, set[int]()
    while place not in seen:
        seen.add(place)
        handlers = [one.target for one in ranges if one.start <= place < one.end]
        if not handlers:
            break
        place = handlers[0]
        found += _caught_by(frame, listed[instructions[place] :])
    return found


def _caught_by(frame: FrameType, handler: list[dis.Instruction]) -> list[Any]:
    """The classes that the clauses of one handler name; ``BaseException`` if it has a clause without any, and
    ``Exception`` for ``contextlib.suppress``."""
    found: list[Any] = []
    named: list[Any] = []
    resumes_at: int | None = None
    for number, one in enumerate(handler):
        if resumes_at is not None and one.offset < resumes_at:
            continue
        if one.opname == "CHECK_EXC_MATCH":
            found += [kind for each in named for kind in (each if isinstance(each, tuple) else (each,))]
            named = []
            following = handler[number + 1]
            resumes_at = following.argval if isinstance(following.argval, int) else None
        elif one.opname.startswith("LOAD_ATTR") and named:
            named[-1] = getattr(named[-1], str(one.argval), None)
        elif one.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            named.append(frame.f_globals.get(one.argval, getattr(builtins, one.argval, None)))
        elif one.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            named.append(frame.f_locals.get(str(one.argval)))
        elif one.opname == "WITH_EXCEPT_START" and "suppress" in frame.f_code.co_names:
            return [*found, Exception]
        elif one.opname == "POP_TOP" and not named:
            return [*found, BaseException]
        elif one.opname not in _BEFORE_A_MATCH:
            return found
    return found


_BEFORE_A_MATCH = frozenset("PUSH_EXC_INFO BUILD_TUPLE NOP CACHE EXTENDED_ARG PUSH_NULL NOT_TAKEN".split())
