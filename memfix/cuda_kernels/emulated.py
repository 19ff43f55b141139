"""Emulate CUDA kernels on the host: a C++ compiler builds the same source with ``emulation.h``.

    with emulated() as traffic:
        tiled_matmul(left, right)          # tensors on the CPU
    traffic.loads                          # elements loaded from global memory

An access out of bounds, or a barrier that some threads of a block do not reach, raises :class:`KernelFault`.
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
from .compiled import CACHED_SOURCES, CompilerRefused, packed_arguments, padded_to_3d

if TYPE_CHECKING:
    import torch

_HEADER = Path(__file__).with_name("emulation.h")
_OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-D_XOPEN_SOURCE=700")


class KernelFault(Exception):
    """An emulated kernel made an error, such as an access out of bounds; the message names the thread."""


@dataclass
class Traffic:
    """Counts of accesses to global memory: elements that threads load and store, and requests and sectors of warps.

    A request is one load instruction of a warp, and its ``sectors`` are the 32-byte sectors that its addresses touch.
    The n-th loads of a warp's threads from one pointer count as one request, so requests and sectors are exact only if
    all threads of a warp do the same loads.
    """

    loads: int = 0
    stores: int = 0
    requests: int = 0
    sectors: int = 0


_TRAFFIC: ContextVar[Traffic | None] = ContextVar("traffic of emulated kernels", default=None)


@contextlib.contextmanager
def emulated() -> Iterator[Traffic]:
    """Emulate the kernels that are launched on CPU tensors inside, and yield the counts of their memory accesses."""
    traffic = Traffic()
    before = _TRAFFIC.set(traffic)
    try:
        yield traffic
    finally:
        _TRAFFIC.reset(before)


def is_emulating() -> bool:
    return _TRAFFIC.get() is not None


def cannot_emulate() -> str | None:
    """Return why kernels cannot be emulated on this machine; None if they can."""
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
    """Emulate one launch, block after block."""
    pointers = packed_arguments(kernel, values)
    sizes = [
        _elements_of(argument) if parameter.is_pointer else 0
        for parameter, argument in zip(kernel.parameters, arguments, strict=True)
    ]
    counted = (ctypes.c_uint64 * 4)()
    run = getattr(_built(host_source(kernel.source)), f"emulate_{kernel.name}")
    run.restype = ctypes.c_char_p
    grid_size, block_size = ((ctypes.c_uint * 3)(*padded_to_3d(shape)) for shape in (grid, block))
    fault = run(
        grid_size, block_size, ctypes.c_uint(shared_bytes), pointers, (ctypes.c_int64 * len(sizes))(*sizes), counted
    )
    if fault is not None:
        raise KernelFault(f"{kernel.name}: {fault.decode()}")
    traffic = _TRAFFIC.get()
    assert traffic is not None
    for name, number in zip(("loads", "stores", "requests", "sectors"), counted, strict=True):
        setattr(traffic, name, getattr(traffic, name) + number)


def _elements_of(tensor: torch.Tensor | None) -> int:
    """The number of elements in memory from the first to the last, gaps included."""
    if tensor is None or not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


# ---------------------------------------------------------------- the source for the host
@functools.lru_cache(CACHED_SOURCES)
def host_source(source: str) -> str:
    """Return a kernel's source for the host compiler: kernels take ``emulation::Global`` for pointers, which counts
    and checks accesses, and each kernel gets a C function that runs it. The rest of the source is unchanged."""
    for_host, runners = source, []
    for declaration in declarations(source):
        name, parameters = declaration["name"], parameters_of(source, declaration["name"])
        typed = ", ".join(f"{_host_type(parameter)} {parameter.name}" for parameter in parameters)
        for_host = for_host.replace(declaration[0], f'extern "C" void {name}({typed})')
        runners.append(_runner(name, parameters))
    return "\n".join(['#include "emulation.h"', for_host, *runners])


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
    """Load the library of a host source from the user's cache, or compile it, which takes about a second.

    ``PyDLL`` holds the GIL during a launch, because the library's fibers and counters are global.
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
            raise CompilerRefused(f"does not compile for the host:\n{ended.stderr.strip()}")
        keep(path, out.read_bytes())
        return ctypes.PyDLL(str(out))
