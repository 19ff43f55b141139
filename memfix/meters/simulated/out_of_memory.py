"""Out-of-memory errors for steps that catch them. A step that does not is measured to its end, however large it is."""

from __future__ import annotations

import ast
import functools
import linecache
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
    """The classes that are caught around the line that a frame runs, innermost first."""
    code = frame.f_code
    around = [
        node
        for node in _statements_that_catch(code.co_filename)
        if node.lineno >= code.co_firstlineno and _is_in(node.body, frame.f_lineno)
    ]
    found: list[Any] = []
    for node in reversed(around):
        for kind in _kinds(node):
            value = BaseException if kind is None else _value(kind, frame)
            found += value if isinstance(value, tuple) else [value]
    return found


@functools.lru_cache(64)
def _statements_that_catch(file: str) -> tuple[ast.Try | ast.TryStar | ast.With, ...]:
    """The ``try`` and ``with`` statements of a file, outer ones first; none where there is no source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, (ast.Try, ast.TryStar, ast.With)))


def _is_in(body: list[ast.stmt], line: int) -> bool:
    return body[0].lineno <= line <= (body[-1].end_lineno or 0)


def _kinds(node: ast.Try | ast.TryStar | ast.With) -> Iterator[ast.expr | None]:
    """The expressions that name what a statement catches; None if it catches everything."""
    if not isinstance(node, ast.With):
        yield from (handler.type for handler in node.handlers)
        return
    for item in node.items:
        called = item.context_expr
        if isinstance(called, ast.Call) and ast.unparse(called.func).split(".")[-1] == "suppress":
            yield from called.args


def _value(expression: ast.expr, frame: FrameType) -> Any:
    compiled = compile(ast.Expression(expression), frame.f_code.co_filename, "eval")
    try:
        return eval(compiled, frame.f_globals, frame.f_locals)
    except Exception:  # a name that is not there yet: then Python would raise another error
        return None
