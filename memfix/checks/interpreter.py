"""A check in a child process in which Triton kernels are interpreted: how they are compared where there is no GPU.

Triton decides it when it is first imported, for all kernels of a process. Here the other checks need it compiled, or
rather left alone, since a simulated step launches nothing.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.util import Finalize
from typing import TypeVar

from .children import StartMethod, take_one_core

VARIABLE = "TRITON_INTERPRET"
SHARE, LEAST = 8, 4
"""An interpreted kernel takes hundreds of times as long: of this many examples one is drawn, and so many at least."""

_BEFORE_QUEUES = 100

Result = TypeVar("Result")


class CannotInterpret(Exception):
    """Why there is no interpreter to be had, in words."""


def is_interpreting() -> bool:
    return os.environ.get(VARIABLE) == "1"


def in_interpreter(function: Callable[[], Result]) -> Result:
    """``function()`` from a child with the interpreter on. The function and its result travel by pickle."""
    if reason := _missing_package():
        raise CannotInterpret(reason)
    start_interpreter()
    return _CHILDREN[0].submit(function).result()


def start_interpreter(method: StartMethod = "spawn") -> None:
    """Start the child now, where other threads will ask for it: until it has started, this whole process looks as if
    it interpreted, to Triton and to any process that is started meanwhile."""
    if not _CHILDREN and not _missing_package():
        # where Triton is imported, it has decided already
        _CHILDREN.append(_started("spawn" if "triton" in sys.modules else method))


def _missing_package() -> str | None:
    """What Triton's interpreter needs and is not here, with what to install."""
    if importlib.util.find_spec("triton") is None:  # not imported: that decides whether this process interprets
        return "triton is not installed; pip install triton"
    try:
        import numpy  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == "numpy":
            return "numpy is not installed; pip install numpy"
        return _broken_numpy(error)
    except Exception as error:
        return _broken_numpy(error)
    return None


def _broken_numpy(error: Exception) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"numpy cannot be imported ({type(error).__name__}: {first}); pip install --force-reinstall numpy"


def _start() -> None:
    import numpy

    from .mended_interpreter import mend
    from .quick_interpreter import hurry

    numpy.seterr(all="ignore")  # a GPU says nothing either where it gives inf or nan, and what comes out is compared
    take_one_core()
    mend()
    hurry()


_CHILDREN: list[ProcessPoolExecutor] = []
"""One for all checks of this process: it takes seconds to start. One that dies is not started again and again."""


def _started(method: StartMethod) -> ProcessPoolExecutor:
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = "1"  # a child begins with the environment of this moment
    try:
        child = ProcessPoolExecutor(1, multiprocessing.get_context(method), initializer=_start)
        child.submit(os.getpid)  # now it has its environment
        # a worker waits at its end for what it started: it must be told before the queue to it is closed
        Finalize(child, child.shutdown, exitpriority=_BEFORE_QUEUES)
        return child
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
