"""Compile kernels for the simulated GPU as each case launches them, and hold them to a block's shared memory.

Triton's interpreter runs kernels that its compiler refuses, and a C++ compiler of the host takes functions that a GPU
does not have; neither limits shared memory. So a kernel can be equal on every CPU and fail in the first step on a GPU.
No GPU is needed to compile: Triton's own compiler does, and NVRTC or nvcc for CUDA C++.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from ..contract import Contract
from ..cuda_kernels import CudaKernel, compiled
from ..laws import Phase
from ..meters.base import Meter, Simulation
from ..meters.simulated import SimulatedMeter
from ..meters.simulated.gpus import GPU
from ..meters.simulated.launches import Launch
from ..meters.simulated.triton_driver import TritonDriver
from ..meters.timeline import Line
from .finding import Finding
from .form_call import FormCall, StepOf
from .interpreter import VARIABLE, is_interpreting
from .measured import SharedMemory

_THREADS = 4
_LINES = 6


def check_compiles(contract: Contract, form: str, meter: Meter) -> Finding:
    """Compile every kernel that ``form`` launches at its cases, with gradients and without, for a simulated GPU.

    A form of the language ``triton`` may launch CUDA kernels too. The finding says which compiler is missing."""
    simulation = meter.simulation
    assert simulation is not None
    gpu = simulation.gpu
    shared_bytes: dict[str, int] = {}
    """By the hash or the name of the kernel."""
    tuned: dict[str, None] = {}
    missing: dict[str, None] = {}
    if contract.forms[form].is_interpreted and (reason := no_triton_compiler()):
        return _none_compiled(contract, form, gpu, reason)
    for case, phase, launch in launches_of(contract, form, simulation):
        if reason := no_compiler(launch.kernel):
            missing[reason] = None
            continue
        if launch.is_tuned:
            tuned[launch.name] = None
            continue
        failing = partial(Finding, "compile", contract.name, form, "fail", case=case, phase=phase)
        try:
            key, shared = (_compile_cuda if isinstance(launch.kernel, CudaKernel) else _compile_triton)(gpu, launch)
        except Refused as refused:
            first, *more = refused.said.splitlines()
            return failing(
                message=f"{launch.name} does not compile for {gpu.name}: {first}",
                details=(
                    *([f"  {refused.line}"] if refused.line else []),
                    *(f"  {line}" for line in more[:_LINES]),
                ),
                source=refused.line.place if refused.line else "",
            )
        shared_bytes[key] = shared
        if shared > gpu.shared_memory_bytes:
            line = first_line_of(launch.kernel)
            return failing(
                message=f"{launch.name} needs {shared:,} bytes of shared memory, "
                f"and a block on {gpu.name} has at most {gpu.shared_memory_bytes:,}",
                details=(f"  {line}",),
                measured=SharedMemory(shared),
                source=line.place,
            )
    if missing and not shared_bytes:
        return _none_compiled(contract, form, gpu, "; ".join(missing))
    largest = max(shared_bytes.values(), default=0)
    message = f"{len(shared_bytes)} kernels compile for {gpu.name}, with at most {largest:,} bytes of shared memory, "
    message += f"allowed {gpu.shared_memory_bytes:,}"
    message += f"; not compiled, since a GPU chooses how: {', '.join(tuned)}" if tuned else ""
    message += "".join(f"; others not compiled: {reason}" for reason in missing)
    return Finding("compile", contract.name, form, "pass", message, measured=SharedMemory(largest))


def _none_compiled(contract: Contract, form: str, gpu: GPU, reason: str) -> Finding:
    return Finding("compile", contract.name, form, "note", f"kernels not compiled for {gpu.name}: {reason}")


def compile_ahead(steps: Iterable[StepOf]) -> None:
    """Compile in several threads what steps on the real GPU will launch. A step itself compiles one kernel at a time.

    Launches that are not foreseen, and kernels that do not compile, are left to the step.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # an older Triton
        return
    meter = SimulatedMeter()
    with ThreadPoolExecutor(_THREADS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for step in steps:
            with contextlib.suppress(Exception):
                for launch in meter.launches(step):
                    if not isinstance(launch.kernel, CudaKernel) and not launch.is_tuned:
                        launch.compile()


def launches_of(contract: Contract, form: str, meter: Simulation) -> Iterator[tuple[str, Phase, Launch]]:
    for case in contract.cases:
        call = FormCall.at_case(contract, form, case)
        for phase in call.phases:
            if phase != "held":  # train runs the same forward
                yield from ((case, phase, launch) for launch in meter.launches(call.step(phase)))


# ---------------------------------------------------------------- compilers
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


def first_line_of(kernel: Any) -> Line:
    if isinstance(kernel, CudaKernel):
        return Line(str(kernel.path), kernel.first_line, kernel.name)
    return _line_in(kernel.fn, 1)


def _compile_triton(gpu: GPU, launch: Launch) -> tuple[str, int]:
    """Return the hash of the compiled kernel, and its shared memory. Raise ``Refused`` where it does not compile."""
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


def _compile_cuda(gpu: GPU, launch: Launch) -> tuple[str, int]:
    """Return the name of the kernel, and its shared memory: what it declares, which the compiler limits too, plus what
    the launch requests. Raise ``Refused`` where it does not compile."""
    kernel = launch.kernel
    try:
        binary = compiled.cubin_of(kernel, gpu.capability)
    except compiled.CompilerRefused as error:
        raise Refused(str(error)) from error
    declared = compiled.static_shared_bytes(binary, kernel.name, gpu.capability)
    return kernel.name, declared + launch.options["shared_bytes"]
