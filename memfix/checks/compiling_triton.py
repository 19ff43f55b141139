"""Triton's kernels compiled for a GPU that is not there."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..meters.simulated.triton_driver import TritonDriver
from ..meters.timeline import Line
from .compiling_result import Refused
from .interpreter import VARIABLE, is_interpreting

if TYPE_CHECKING:
    from ..meters.simulated.gpus import GPU
    from ..meters.simulated.launches import Launch


def no_compiler() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if is_interpreting():
        return f"{VARIABLE} is set, and Triton interprets them"
    from triton.backends import backends

    return None if "nvidia" in backends else "this triton does not compile for NVIDIA"


class _Driver(TritonDriver):
    def get_current_device(self) -> int:
        return -self.capability  # Triton caches kernels by this number, and no real device has it


def compile_for(gpu: GPU, launch: Launch, stack: contextlib.ExitStack) -> tuple[str, int]:
    """The hash of the kernel that a launch needs, and its shared memory. Raises ``Refused``. Until ``stack`` ends,
    Triton compiles for ``gpu``."""
    from triton.runtime import driver

    if not isinstance(driver._active, _Driver):
        stack.enter_context(compiling_for(gpu))
    try:
        binary = launch.compile()
    except OSError:
        raise  # an error of the compiler's own files, not of the kernel
    except Exception as error:
        cause = _innermost(error)
        said = getattr(cause, "error_message", None) or str(cause) or type(cause).__name__
        raise Refused(said, _line_of(launch.kernel, cause)) from error
    return binary.hash, binary.metadata.shared


@contextlib.contextmanager
def compiling_for(gpu: GPU) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(gpu))
    try:
        yield
    finally:
        driver.set_active(before)


def first_line_of(kernel: Any) -> Line:
    return _line_in(kernel.fn, 1)


def _innermost(error: BaseException) -> BaseException:
    """The error in the function that a kernel calls: Triton raises one for the call from it."""
    while hasattr(error.__cause__, "node"):
        assert error.__cause__ is not None
        error = error.__cause__
    return error


def _line_of(kernel: Any, error: BaseException) -> Line | None:
    """The line that the compiler refused, where it names one."""
    source, number = getattr(error, "src", None), getattr(getattr(error, "node", None), "lineno", None)
    if source is None or number is None:
        return None
    called = (kernel, *kernel.fn.__globals__.values())
    return next((_line_in(f.fn, number) for f in called if getattr(f, "src", None) == source), None)


def _line_in(function: Any, number: int) -> Line:
    """The line with this number, counted from the ``def`` of a function."""
    lines, first = inspect.getsourcelines(function)
    decorators = next(i for i, text in enumerate(lines) if text.lstrip().startswith("def "))
    return Line(inspect.getsourcefile(function) or "", first + decorators + number - 1, function.__name__)
