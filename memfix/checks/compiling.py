"""Kernels compile for the simulated GPU as each case launches them, within the shared memory that a block may take.

An interpreter runs what a compiler refuses, and knows no limit of shared memory. So a kernel can be equal on every CPU
and fail in the first step on a GPU.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from ..contract import Contract
from ..laws import Phase
from ..meters.base import Meter, Simulation
from ..meters.simulated import SimulatedMeter
from ..meters.timeline import Line
from .finding import Finding
from .form_call import FormCall
from .inputs import StepOf
from .interpreter import VARIABLE, is_interpreting
from .measured import SharedMemory

if TYPE_CHECKING:
    from ..meters.simulated.gpus import GPU
    from ..meters.simulated.launches import Launch

_WARP = 32
_THREADS = 4
_LINES = 6


def check_compiles(contract: Contract, form: str, meter: Meter) -> Finding:
    """Compile every kernel that ``form`` launches at its cases, with gradients and without, for a simulated GPU."""
    simulation = meter.simulation
    assert simulation is not None
    gpu = simulation.gpu
    if reason := _no_compiler():
        return not_compiled(contract, form, gpu, reason)
    shared_bytes: dict[str, int] = {}
    """By the hash of the kernel."""
    tuned: dict[str, None] = {}
    with _compiling_for(gpu):
        for case, phase, launch in launches_of(contract, form, simulation):
            if launch.is_tuned:
                tuned[launch.name] = None
                continue
            failing = partial(Finding, "compile", contract.name, form, "fail", case=case, phase=phase)
            try:
                binary = launch.compile()
            except OSError:
                raise  # an error of the compiler's own files, not of the kernel
            except Exception as error:
                return _refused(failing, launch, error, gpu)
            shared_bytes[binary.hash] = binary.metadata.shared
            if binary.metadata.shared > gpu.shared_memory_bytes:
                return _too_large(failing, launch, binary.metadata.shared, gpu)
    left_out = f"; not compiled, since a GPU chooses how: {', '.join(tuned)}" if tuned else ""
    return all_compile(contract, form, gpu, shared_bytes.values(), left_out)


def not_compiled(contract: Contract, form: str, gpu: GPU, reason: str) -> Finding:
    """The finding where there is no compiler."""
    return Finding("compile", contract.name, form, "note", f"kernels not compiled for {gpu.name}: {reason}")


def all_compile(contract: Contract, form: str, gpu: GPU, shared_bytes: Collection[int], left_out: str = "") -> Finding:
    """The finding where every kernel compiles, with the shared memory of each."""
    largest = max(shared_bytes, default=0)
    message = f"{len(shared_bytes)} kernels compile for {gpu.name}, with at most {largest:,} bytes of shared memory, "
    message += f"allowed {gpu.shared_memory_bytes:,}{left_out}"
    return Finding("compile", contract.name, form, "pass", message, measured=SharedMemory(largest))


def compile_ahead(steps: Iterable[StepOf]) -> None:
    """Compile what steps on the GPU that is there will launch, on several cores. A step on its own compiles in turn.

    What is not foreseen, or does not compile, is left to the step.
    """
    import triton

    if not hasattr(triton, "AsyncCompileMode"):  # an older Triton
        return
    meter = SimulatedMeter()
    with ThreadPoolExecutor(_THREADS) as pool, triton.AsyncCompileMode(pool, ignore_errors=True):
        for step in steps:
            with contextlib.suppress(Exception):
                for launch in meter.launches(step):
                    if not launch.is_tuned:
                        launch.compile()


def launches_of(contract: Contract, form: str, meter: Simulation) -> Iterator[tuple[str, Phase, Launch]]:
    """Every launch with its case and phase."""
    for case in contract.cases:
        call = FormCall.at_case(contract, form, case)
        for phase in call.phases:
            if phase != "held":  # train begins with it
                yield from ((case, phase, launch) for launch in meter.launches(call.step(phase)))


# ---------------------------------------------------------------- a compiler without a GPU
def _no_compiler() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if is_interpreting():
        return f"{VARIABLE} is set, and Triton interprets them"
    from triton.backends import backends

    return None if "nvidia" in backends else "this triton does not compile for NVIDIA"


class _Driver:
    """Answers what Triton asks a driver before it compiles."""

    def __init__(self, gpu: GPU) -> None:
        major, minor = gpu.capability
        self._capability = 10 * major + minor

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, _WARP)

    def get_current_device(self) -> int:
        return -self._capability  # Triton caches kernels by this number, and no real device has it

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _compiling_for(gpu: GPU) -> Iterator[None]:
    from triton.runtime import driver

    before = driver._active
    driver.set_active(_Driver(gpu))
    try:
        yield
    finally:
        driver.set_active(before)


# ---------------------------------------------------------------- what is said
def _refused(failing: Callable[..., Finding], launch: Launch, error: Exception, gpu: GPU) -> Finding:
    cause = _innermost(error)
    lines = (getattr(cause, "error_message", None) or str(cause) or type(cause).__name__).splitlines()
    line = _line_of(launch.kernel, cause)
    return failing(
        message=f"{launch.name} does not compile for {gpu.name}: {lines[0]}",
        details=(*([f"  {line}"] if line else []), *(f"  {more}" for more in lines[1:_LINES])),
        source=line.place if line else "",
    )


def _too_large(failing: Callable[..., Finding], launch: Launch, shared: int, gpu: GPU) -> Finding:
    line, allowed = _line_in(launch.kernel.fn, 1), gpu.shared_memory_bytes
    return failing(
        message=f"{launch.name} needs {shared:,} bytes of shared memory, "
        f"and a block on {gpu.name} has at most {allowed:,}",
        details=(f"  {line}",),
        measured=SharedMemory(shared),
        source=line.place,
    )


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
