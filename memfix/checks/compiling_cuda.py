"""CUDA kernels compile for the simulated GPU. The compiler refuses more shared memory than a block may declare.

A compiler of the host takes what NVRTC refuses, such as functions that a GPU does not have.
"""

from __future__ import annotations

from ..contract import Contract
from ..cuda_kernels.compiled import CompilerRefused, cubin_of, no_compiler, shared_bytes
from ..meters.base import Meter
from .compiling import all_compile, launches_of, not_compiled
from .finding import Finding

_LINES = 6


def check_cuda_compiles(contract: Contract, form: str, meter: Meter) -> Finding:
    """Compile every kernel that ``form`` launches at its cases. Without a compiler the finding says so."""
    simulation = meter.simulation
    assert simulation is not None
    gpu = simulation.gpu
    if reason := no_compiler():
        return not_compiled(contract, form, gpu, reason)
    shared: dict[str, int] = {}
    for case, phase, launch in launches_of(contract, form, simulation):
        kernel = launch.kernel
        if kernel.name in shared:
            continue
        try:
            binary = cubin_of(kernel, gpu.capability)
        except CompilerRefused as error:
            first, *more = str(error).splitlines()
            message = f"{kernel.name} does not compile for {gpu.name}: {first}"
            details = tuple(f"  {line}" for line in more[:_LINES])
            return Finding("compile", contract.name, form, "fail", message, case, phase, details)
        shared[kernel.name] = shared_bytes(binary, kernel.name, gpu.capability)
    return all_compile(contract, form, gpu, shared.values())
