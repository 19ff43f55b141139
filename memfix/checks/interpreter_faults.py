"""Tells errors of Triton's interpreter itself from errors of the kernel that it runs.

Where the interpreter is incompatible with the installed numpy, or does not support an instruction, its error says
nothing about the kernel.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from types import FrameType

from ..versions import INSTALL_INTERPRETER, INTERPRETERS

_INCOMPATIBLE = (TypeError, AttributeError, NameError, ImportError, OverflowError, Warning)
"""What Python raises where two packages are incompatible. A kernel's wrong values and shapes raise ``ValueError``,
``IndexError`` or ``AssertionError``."""


def interpreter_fault(error: BaseException) -> str | None:
    """Return what failed in the interpreter and what to do, or None if the kernel or the code around it is at fault."""
    causes = _causes(error)
    if not any(_is_interpreter_error(cause) for cause in causes):
        return None
    root = causes[-1]
    frames = list(traceback.walk_tb(root.__traceback__))
    if not frames:
        return None
    frame, line = frames[-1]
    if not _is_interpreters_own(frame):
        return None
    what = f"{type(root).__name__}: {root}"
    if isinstance(root, NotImplementedError):
        return f"Triton's interpreter cannot run this kernel ({what}); compare it on a GPU: memfix check --device cuda"
    if not isinstance(root, _INCOMPATIBLE) or _calls_the_language(frame):
        return None
    return (
        f"Triton's interpreter itself fails with {_version('triton')} and {_version('numpy')} "
        f"({what}, in {Path(frame.f_code.co_filename).name}:{line}); known to work: {INTERPRETERS}: "
        f"{INSTALL_INTERPRETER}"
    )


def _causes(error: BaseException) -> list[BaseException]:
    """Return the error and its chain of causes, the first cause last."""
    found = [error]
    while (cause := found[-1].__cause__) is not None:
        found.append(cause)
    return found


def _is_interpreter_error(error: BaseException) -> bool:
    """Compare names, because a process that runs no kernel has not imported Triton."""
    return type(error).__name__ == "InterpreterError" and type(error).__module__.startswith("triton.")


def _is_interpreters_own(frame: FrameType) -> bool:
    """Whether this is code of the interpreter or of numpy. ``triton/language`` is neither: it checks a kernel."""
    file = Path(frame.f_code.co_filename)
    interpreter, numpy = (getattr(sys.modules.get(name), "__file__", None) for name in (_INTERPRETER, "numpy"))
    is_numpys = numpy is not None and file.is_relative_to(Path(numpy).parent)
    return is_numpys or str(file) == interpreter or file == Path(__file__).with_name(_SHORTCUTS)


_INTERPRETER, _SHORTCUTS = "triton.runtime.interpreter", "quick_interpreter.py"


def _calls_the_language(frame: FrameType) -> bool:
    """Whether the code calls a ``member`` of the language, as the interpreter and our shortcut do: an error there comes
    from wrong arguments in the kernel."""
    return "member" in (*frame.f_code.co_varnames, *frame.f_code.co_freevars)


def _version(package: str) -> str:
    return f"{package} {getattr(sys.modules.get(package), '__version__', 'of an unknown version')}"
