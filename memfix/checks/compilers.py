"""Compile one kernel for a GPU that is not there: Triton's own compiler, and NVRTC or nvcc for CUDA C++."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..cuda_kernels import CudaKernel, compiled
from ..meters.simulated.triton_driver import TritonDriver
from ..meters.timeline import Line
from .interpreter import VARIABLE, is_interpreting

if TYPE_CHECKING:
    from ..meters.simulated.gpus import GPU
    from ..meters.simulated.launches import Launch


class Refused(Exception):
    """A compiler refused a kernel. ``said`` is its message, ``line`` the line that it names, if any."""

    def __init__(self, said: str, line: Line | None = None) -> None:
        super().__init__(said)
        self.said, self.line = said, line


def no_compiler(kernel: Any) -> str | None:
    """Why this kernel cannot be compiled here; None where it can."""
    return compiled.no_compiler() if isinstance(kernel, CudaKernel) else no_triton_compiler()


def no_triton_compiler() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if is_interpreting():
        return f"{VARIABLE} is set, and Triton interprets them"
    from triton.backends import backends

    return None if "nvidia" in backends else "this triton does not compile for NVIDIA"


def compile_for(gpu: GPU, launch: Launch) -> tuple[str, int]:
    """Compile the kernel of a launch; return its hash or name, and its shared memory. Raise ``Refused`` if it fails."""
    if isinstance(launch.kernel, CudaKernel):
        return _compile_cuda(gpu, launch)
    return _compile_triton(gpu, launch)


def first_line_of(kernel: Any) -> Line:
    if isinstance(kernel, CudaKernel):
        return Line(str(kernel.path), kernel.first_line, kernel.name)
    return _line_in(kernel.fn, 1)


# ---------------------------------------------------------------- Triton
def _compile_triton(gpu: GPU, launch: Launch) -> tuple[str, int]:
    try:
        with compiling_for(gpu):
            binary = launch.compile()
    except OSError:
        raise  # an error of the compiler's own files, not of the kernel
    except Exception as error:
        cause = _innermost(error)
        said = getattr(cause, "error_message", None) or str(cause) or type(cause).__name__
        raise Refused(said, _line_of(launch.kernel, cause)) from error
    return binary.hash, binary.metadata.shared


class _Driver(TritonDriver):
    def get_current_device(self) -> int:
        return -self.capability  # Triton caches kernels by this number, and no real device has it


@contextlib.contextmanager
def compiling_for(gpu: GPU) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(gpu))
    try:
        yield
    finally:
        driver.set_active(before)


def _innermost(error: BaseException) -> BaseException:
    """Return the error in the function that a kernel calls, from which Triton raises one for the call."""
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


# ---------------------------------------------------------------- CUDA
def _compile_cuda(gpu: GPU, launch: Launch) -> tuple[str, int]:
    """The shared memory is what the kernel declares, which the compiler limits too, plus what the launch requests."""
    kernel = launch.kernel
    try:
        binary = compiled.cubin_of(kernel, gpu.capability)
    except compiled.CompilerRefused as error:
        raise Refused(str(error)) from error
    declared = compiled.static_shared_bytes(binary, kernel.name, gpu.capability)
    return kernel.name, declared + launch.options["shared_bytes"]
