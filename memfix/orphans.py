"""Child processes that end with their parent, even where that is killed.

A parent that is killed tells its children nothing, and a child that waits for work on a pipe waits for ever where
processes that were forked beside it hold the other end open too. On Linux the system kills such a child. Elsewhere
children are spawned and hold no other's pipes, so that most of them read the end of theirs; only a worker of a process
pool stays, and must be ended by hand. A thread that watches the parent would spoil what the host meter counts.
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

    Linux counts the thread that started it as the parent: a child must not be needed for longer than that thread lives.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be watched
        os._exit(1)
