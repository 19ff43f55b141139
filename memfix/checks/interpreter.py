"""Run functions in a child process in which Triton interprets kernels, so that they are compared without a GPU.

Triton decides at its first import, for all kernels of a process, whether it interprets. The other checks need a process
in which it does not.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from ..orphans import ends_with_parent
from .children import StartMethod, take_one_core
from .mended_interpreter import mend
from .quick_interpreter import hurry

VARIABLE = "TRITON_INTERPRET"
Result = TypeVar("Result")


class CannotInterpret(Exception):
    """Kernels cannot be interpreted here; the message says why."""


class InterpreterEnded(Exception):
    """The child ended before it answered. ``is_crash``: a kernel crashed it, as by a store out of bounds."""

    def __init__(self, exit_code: int | None) -> None:
        self.is_crash = exit_code is not None and -exit_code in _CRASHES
        message = f"could not be compared: the process that interprets kernels ended with {exit_code}"
        if self.is_crash:
            message = f"ends the process that interprets it with {exit_code}: it reads or writes out of bounds"
        super().__init__(message)


_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)


def is_interpreting() -> bool:
    return os.environ.get(VARIABLE) == "1"


def in_interpreter(function: Callable[[], Result]) -> Result:
    """Return ``function()``, called where kernels are interpreted: in this process if it interprets, else in a child.

    The function and its result are pickled on their way to the child and back.
    """
    if is_interpreting():
        mend()  # where the user set the variable, no other code has called it yet
        return function()
    if reason := _missing_package():
        raise CannotInterpret(reason)
    start_interpreter()
    return _RUNNING[0].call(function)


def start_interpreter(method: StartMethod = "spawn") -> None:
    """Start the child now, before other threads use it: while it starts, an environment variable makes Triton, and any
    process that is started meanwhile, interpret too."""
    if _RUNNING and not _RUNNING[0].is_running():
        _RUNNING.clear()
    if not _RUNNING and not _missing_package():
        # a fork of a process that imported Triton inherits its decision
        _RUNNING.append(_Interpreter("spawn" if "triton" in sys.modules else method))


def _missing_package() -> str | None:
    """Return which package of Triton's interpreter is missing and what to install; None where none is."""
    if importlib.util.find_spec("triton") is None:  # an import would decide whether this process interprets
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


def prepare_to_interpret() -> None:
    """Prepare a process that interprets kernels, before the first one."""
    import numpy

    numpy.seterr(all="ignore")  # as on a GPU, inf and nan give no warning: results are compared
    take_one_core()
    mend()
    hurry()


class _Interpreter:
    """A child that calls functions, one at a time. It needs no thread in this process, which may so fork others."""

    def __init__(self, method: StartMethod) -> None:
        context: Any = multiprocessing.get_context(method)
        self._ours, theirs = context.Pipe()
        self._one_at_a_time = threading.Lock()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        before = os.environ.get(VARIABLE)
        os.environ[VARIABLE] = "1"  # a child inherits the environment of this moment
        try:
            self._process.start()
        finally:
            if before is None:
                del os.environ[VARIABLE]
            else:
                os.environ[VARIABLE] = before
        theirs.close()
        self._owner = os.getpid()

    def is_running(self) -> bool:
        """Whether the child runs and belongs to this process. It ends with the thread that started it."""
        return self._owner == os.getpid() and self._process.is_alive()

    def call(self, function: Callable[[], Result]) -> Result:
        with self._one_at_a_time:
            try:
                self._ours.send(function)
                result, error = self._ours.recv()
            except (EOFError, ConnectionError):
                self._process.join()
                _RUNNING.clear()  # the next check starts another
                raise InterpreterEnded(self._process.exitcode) from None
        if error is not None:
            raise error
        return result


_RUNNING: list[_Interpreter] = []
"""The child, once started: one for all checks of this process, since it takes seconds to start."""


@ends_with_parent
def _serve(connection: Connection) -> None:
    prepare_to_interpret()
    while True:
        try:
            function = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[Any, BaseException | None] = (function(), None)
        except BaseException as error:
            answer = (None, error)
        try:
            connection.send(answer)
        except Exception as error:  # it cannot be pickled
            connection.send((None, RuntimeError(f"{answer!r} cannot be sent: {error}")))
