"""End child processes with their parent, even where the parent is killed.

A killed parent cannot tell its children, and a child that waits for work on a pipe waits for ever if siblings, forked
beside it, hold the other end open too. On Linux the kernel kills such a child. Elsewhere children are spawned and
inherit no sibling's pipes, so most of them read the end of theirs; only a worker of a process pool stays, and must be
ended by hand. A thread that watches the parent would disturb what the host meter counts.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Main = TypeVar("Main", bound=Callable[..., Any])
_PR_SET_PDEATHSIG = 1


def ends_with_parent(main: Main) -> Main:
    """Decorate the function that a child of ``multiprocessing`` begins with."""

    @functools.wraps(main)
    def main_of_child(*arguments: Any, **keywords: Any) -> Any:
        process = multiprocessing.parent_process()
        assert process is not None, f"{main.__name__} is for a child process"
        assert process.pid is not None
        end_with(process.pid)
        return main(*arguments, **keywords)

    return main_of_child  # type: ignore[return-value]


def end_with(parent: int) -> None:
    """Have this process killed when ``parent``, which started it, ends.

    For Linux the parent is the thread that started the child, so the child lives no longer than that thread.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)
