"""Run CUDA kernels on the host: the same source, compiled by its C++ compiler behind ``emulation.h``.

    with emulated() as traffic:
        tiled_matmul(left, right)          # tensors of the CPU
    traffic.loads                          # from global memory

A read or write out of bounds, and a barrier that some threads of a block do not reach, raise :class:`KernelFault`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import CudaKernel, Parameter, declarations, parameters_of
from .binaries import keep, path_of
from .compiled import as_c, three

if TYPE_CHECKING:
    import torch

_HEADER = Path(__file__).with_name("emulation.h")
_OPTIONS = ("-std=c++17", "-O2", "-shared", "-fPIC", "-w", "-D_XOPEN_SOURCE=700")


class KernelFault(Exception):
    """What a kernel did that it must not do, with the thread that did it."""


@dataclass
class Traffic:
    """Accesses of all threads to global memory, an element each, and of all warps.

    A request is one load of the threads of a warp; it takes as many ``sectors`` of 32 bytes as its addresses lie in.
    It is told by the order of a thread's loads, so sectors are exact where all threads of a warp load alike.
    """

    loads: int = 0
    stores: int = 0
    requests: int = 0
    sectors: int = 0


_TRAFFIC: ContextVar[Traffic | None] = ContextVar("traffic of emulated kernels", default=None)


@contextlib.contextmanager
def emulated() -> Iterator[Traffic]:
    """Inside, kernels that are launched on tensors of the CPU are emulated, and what they load is counted."""
    traffic = Traffic()
    before = _TRAFFIC.set(traffic)
    try:
        yield traffic
    finally:
        _TRAFFIC.reset(before)


def is_emulating() -> bool:
    return _TRAFFIC.get() is not None


def cannot_emulate() -> str | None:
    """Why kernels cannot be emulated here; None where they can."""
    if platform.system() == "Windows":
        return "Windows has no ucontext.h"
    return None if _compiler() else "there is no C++ compiler; install g++, or set CXX"


def emulate(
    kernel: CudaKernel,
    grid: Sequence[int],
    block: Sequence[int],
    arguments: Sequence[Any],
    values: Sequence[float],
    shared_bytes: int = 0,
) -> None:
    """Run one launch. Blocks run one after the other."""
    pointers = as_c(kernel, values)
    sizes = [
        _elements_of(argument) if parameter.is_pointer else 0
        for parameter, argument in zip(kernel.parameters, arguments, strict=True)
    ]
    counted = (ctypes.c_uint64 * 4)()
    run = getattr(_built(host_source(kernel)), f"emulate_{kernel.name}")
    run.restype = ctypes.c_char_p
    fault = run(
        (ctypes.c_uint * 3)(*three(grid)), (ctypes.c_uint * 3)(*three(block)), ctypes.c_uint(shared_bytes),
        pointers, (ctypes.c_int64 * len(sizes))(*sizes), counted,
    )  # fmt: skip
    if fault is not None:
        raise KernelFault(f"{kernel.name}: {fault.decode()}")
    traffic = _TRAFFIC.get()
    assert traffic is not None
    for name, number in zip(("loads", "stores", "requests", "sectors"), counted, strict=True):
        setattr(traffic, name, getattr(traffic, name) + number)


def _elements_of(tensor: torch.Tensor | None) -> int:
    """From the first element of a tensor up to its last, in memory."""
    if tensor is None or not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# ---------------------------------------------------------------- the source for the host
def host_source(kernel: CudaKernel) -> str:
    """The file of a kernel as the host compiles it: pointers in the declarations of kernels are counted and checked,
    and every kernel has a function that runs it. All else is as it was."""
    source = kernel.source
    runners = []
    for declaration in declarations(kernel.source):
        name, parameters = declaration["name"], parameters_of(kernel.source, declaration["name"])
        typed = ", ".join(f"{_host_type(parameter)} {parameter.name}" for parameter in parameters)
        source = source.replace(declaration[0], f'extern "C" void {name}({typed})')
        runners.append(_runner(name, parameters))
    return "\n".join(['#include "emulation.h"', source, *runners])


def _host_type(parameter: Parameter) -> str:
    return f"emulation::Global<{parameter.type}>" if parameter.is_pointer else parameter.type


def _runner(name: str, parameters: Sequence[Parameter]) -> str:
    taken = [
        f'{_host_type(parameter)}(*static_cast<void **>(arguments[{i}]), sizes[{i}], {i}, "{parameter.name}")'
        if parameter.is_pointer
        else f"*static_cast<{parameter.type} *>(arguments[{i}])"
        for i, parameter in enumerate(parameters)
    ]
    return (
        f'extern "C" const char *emulate_{name}(const unsigned *grid, const unsigned *block, unsigned shared_bytes, '
        "void **arguments, const int64_t *sizes, emulation::Traffic *traffic) {\n"
        f"    return emulation::run(grid, block, shared_bytes, traffic, [=] {{ {name}({', '.join(taken)}); }});\n}}"
    )


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX") or "g++", "c++"))), None)


@functools.cache
def _built(source: str) -> ctypes.PyDLL:
    """A library of the source, from the user's cache if it is there. It is compiled in about a second.

    It is called with Python's lock held: its fibers and counters are of one launch at a time.
    """
    compiler = _compiler()
    assert compiler is not None
    path = path_of(
        "emulated", ".so", source, _HEADER.read_text(encoding="utf-8"), compiler, platform.machine(), *_OPTIONS
    )
    if path.exists():
        return ctypes.PyDLL(str(path))
    with tempfile.TemporaryDirectory(prefix="memfix-emulated-") as folder:
        out = Path(folder, "kernels.so")
        command = [compiler, *_OPTIONS, f"-I{_HEADER.parent}", "-x", "c++", "-", "-o", str(out)]
        ended = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise KernelFault(f"does not compile for the host:\n{ended.stderr.strip()}")
        keep(path, out.read_bytes())
        return ctypes.PyDLL(str(out))
