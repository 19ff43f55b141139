"""Finds the line of user code behind a running operator, in forward and in backward."""

from __future__ import annotations

import os
import sys
import traceback
from types import CodeType, FrameType

import torch

from ..timeline import Line

TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
"""The folder of torch."""
_METERS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MEASURE = os.path.join(os.path.dirname(os.path.dirname(_METERS)), "measure.py")
_ENGINE_ENTRY = "_engine_run_backward"
GENERATED_CODE = "memfix-inductor-"
"""The start of the name of a folder with code that a compiler generated."""

Site = tuple[CodeType, int]
"""A code object and a line number. It is cheap to record, and turned into a :class:`Line` only on demand."""


class SourceLines:
    """Remembers which line made each autograd node, and attributes the allocations of its backward to that line."""

    def __init__(self) -> None:
        self._site_of_node: dict[int, Site] = {}

    def current(self) -> Site | None:
        """The user's line that is running; inside a built-in backward node, the forward line that made the node."""
        site = _innermost_user_site()
        node = torch._C._current_autograd_node()
        if node is None:
            if site is not None and torch.is_grad_enabled():
                # an op's node is numbered just before the op is dispatched, so the first op seen with it made the node
                self._site_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)
            return site
        if site is not None:
            return site  # a custom Function's backward, a hook, or a checkpoint that recomputes
        return self._site_of_node.get(node._sequence_nr())

    def remember_node(self) -> None:
        """Attribute the newest autograd node to the user's line that is running, which made it without an operator."""
        site = _innermost_user_site()
        if site is not None:
            self._site_of_node.setdefault(torch._C._autograd._get_sequence_nr() - 1, site)


def _innermost_user_site() -> Site | None:
    """The innermost frame outside torch and the meters; None if the autograd engine made the call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(TORCH):
            if code.co_name == _ENGINE_ENTRY:
                return None
        elif not (code.co_filename.startswith(_METERS) or _is_generated(code)):
            return code, frame.f_lineno
        frame = frame.f_back
    return None


def _is_generated(code: CodeType) -> bool:
    return GENERATED_CODE in code.co_filename or code.co_filename.startswith(
        "<eval_with_key>"
    )  # the latter by torch.fx


def line_of(site: Site | None) -> Line | None:
    return None if site is None else Line(site[0].co_filename, site[1], site[0].co_name)


def user_line(error: BaseException) -> Line | None:
    """The innermost line outside torch and the meters in the traceback of ``error``."""
    frames = [(frame.f_code, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    ours = (TORCH, _METERS, _MEASURE)
    theirs = [site for site in frames if not (site[0].co_filename.startswith(ours) or _is_generated(site[0]))]
    return line_of(theirs[-1]) if theirs else None
