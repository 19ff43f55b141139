"""Compile kernels for the simulated GPU as each case launches them, and hold them to a block's shared memory.

Triton's interpreter runs kernels that its compiler refuses, and a C++ compiler of the host takes functions that a GPU
does not have; neither limits shared memory. So a kernel can be equal on every CPU and fail in the first step on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ..contract import Contract
from ..cuda_kernels import CudaKernel
from ..laws import Phase
from ..meters.base import Meter, Simulation
from ..meters.simulated import SimulatedMeter
from ..meters.simulated.gpus import GPU
from ..meters.simulated.launches import Launch
from .compilers import Refused, compile_for, first_line_of, no_compiler, no_triton_compiler
from .finding import Finding
from .form_call import FormCall, StepOf
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
            key, shared = compile_for(gpu, launch)
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
    """Yield every launch of ``form`` with its case and phase."""
    for case in contract.cases:
        call = FormCall.at_case(contract, form, case)
        for phase in call.phases:
            if phase != "held":  # train runs the same forward
                yield from ((case, phase, launch) for launch in meter.launches(call.step(phase)))
