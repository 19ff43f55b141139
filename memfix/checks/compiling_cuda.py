"""CUDA kernels compiled for a GPU that is not there.

A compiler of the host takes what NVRTC refuses, such as functions that a GPU does not have.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from ..cuda_kernels import CudaKernel
from ..cuda_kernels.compiled import CompilerRefused, cubin_of, no_compiler, static_shared_bytes
from ..meters.timeline import Line
from .compiling_result import Refused

if TYPE_CHECKING:
    from ..meters.simulated.gpus import GPU
    from ..meters.simulated.launches import Launch

__all__ = ["compile_for", "first_line_of", "no_compiler"]


def compile_for(gpu: GPU, launch: Launch, stack: contextlib.ExitStack) -> tuple[str, int]:
    """The kernel of a launch, and its shared memory: what it declares, which the compiler limits too, and what the
    launch asks for."""
    kernel = launch.kernel
    try:
        binary = cubin_of(kernel, gpu.capability)
    except CompilerRefused as error:
        raise Refused(str(error)) from error
    return kernel.name, static_shared_bytes(binary, kernel.name, gpu.capability) + launch.options["shared_bytes"]


def first_line_of(kernel: CudaKernel) -> Line:
    return Line(str(kernel.path), kernel.first_line, kernel.name)
