"""Compile kernels for a GPU with NVRTC, which torch's CUDA wheels bring, or nvcc; launch them by the CUDA driver."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import shutil
import struct
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .binaries import keep, path_of

if TYPE_CHECKING:
    from . import ArgumentBuffer, CudaKernel

_PACKED = {"int": "i4x", "long long": "q", "float": "f4x", "double": "d"}
"""``struct`` formats of C's number types, each padded to eight bytes."""
_HEADER = Path(__file__).with_name("instructions.h")
_OPTIONS = ("--std=c++17",)
CACHED_SOURCES = 16  # sources whose binaries are cached in memory
_MOST_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class CompilerRefused(Exception):
    """The source does not compile; the message is the compiler's own."""


# ---------------------------------------------------------------- source to binary
def no_compiler() -> str | None:
    """Return why no kernel can be compiled for a GPU on this machine; None if it can."""
    if _nvrtc() is None and shutil.which("nvcc") is None:
        return "neither NVRTC nor nvcc is here; pip install nvidia-cuda-nvrtc"
    return None


def cubin_of(kernel: CudaKernel, capability: tuple[int, int]) -> bytes:
    """Compile the kernel's file for a compute capability. Raises ``CompilerRefused`` with the compiler's log."""
    own = "a" if capability == (9, 0) else ""  # sm_90a enables instructions that only Hopper has, such as wgmma
    return _cubin_of(kernel.path.name, kernel.source, "sm_{}{}".format(*capability) + own)


@functools.lru_cache(CACHED_SOURCES)
def _cubin_of(name: str, source: str, architecture: str) -> bytes:
    whole = _HEADER.read_text(encoding="utf-8") + source
    path = path_of("compiled", ".cubin", whole, _compiler(), architecture, *_OPTIONS)
    with contextlib.suppress(OSError):
        return path.read_bytes()
    nvrtc = _nvrtc()
    cubin = _by_nvcc(name, whole, architecture) if nvrtc is None else _by_nvrtc(nvrtc, name, whole, architecture)
    keep(path, cubin)
    return cubin


def static_shared_bytes(cubin: bytes, name: str, capability: tuple[int, int]) -> int:
    """The static shared memory of a kernel's block: the size of the cubin's ELF section ``.nv.shared.NAME``. From sm_90
    on, 1 KiB is subtracted, which the section includes because the system reserves it in every block."""
    (offset,), (size, number, names_at) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<2I4Q", cubin, offset + size * i) for i in range(number)]
    names = sections[names_at][4]
    for at, *_, length in sections:
        start = names + at
        if cubin[start : cubin.index(b"\0", start)] == f".nv.shared.{name}".encode():
            return int(length) - (1024 if capability >= (9, 0) else 0)
    return 0


@functools.cache
def _nvrtc() -> ctypes.CDLL | None:
    """Load NVRTC of the system, or else of the package that torch's CUDA wheels bring; None if there is none."""
    majors = [torch.version.cuda.split(".")[0]] if torch.version.cuda else ["13", "12"]
    names: list[str] = [f"libnvrtc.so.{major}" for major in majors]
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        names += [str(path) for name in names[: len(majors)] for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


@functools.cache
def _compiler() -> str:
    """The name and version of the compiler, which are part of the cache key of a binary."""
    nvrtc = _nvrtc()
    if nvrtc is None:
        return subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False).stdout
    major, minor = ctypes.c_int(), ctypes.c_int()
    _check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "NVRTC")
    return f"NVRTC {major.value}.{minor.value}"


def _by_nvrtc(nvrtc: ctypes.CDLL, name: str, source: str, architecture: str) -> bytes:
    program = ctypes.c_void_p()
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *_OPTIONS)]
    named = source.encode(), name.encode()
    _check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), *named, 0, None, None), "NVRTC")
    try:
        failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
        if failed:
            raise CompilerRefused(_read(nvrtc, program, "ProgramLog").rstrip(b"\0").decode().strip())
        return _read(nvrtc, program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _read(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    size = ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), "NVRTC")
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{what}")(program, buffer), "NVRTC")
    return buffer.raw


def _by_nvcc(name: str, source: str, architecture: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="memfix-nvcc-") as folder:
        path, out = Path(folder, name), Path(folder, "kernels.cubin")
        path.write_text(source, encoding="utf-8")
        command = ["nvcc", "--cubin", f"-arch={architecture}", *_OPTIONS, "-o", str(out), str(path)]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode:
            raise CompilerRefused((ended.stderr or ended.stdout).replace(f"{folder}/", "").strip())
        return out.read_bytes()


# ---------------------------------------------------------------- a binary on a GPU
@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def function_on(kernel: CudaKernel, index: int, shared_bytes: int = 0) -> ctypes.c_void_p:
    """Compile and load the kernel for the GPU ``index``, and allow its blocks ``shared_bytes`` of dynamic shared
    memory. The function is cached for the life of the process."""
    if reason := no_compiler():
        raise RuntimeError(f"the kernel {kernel.name} cannot be compiled: {reason}")
    cubin = cubin_of(kernel, torch.cuda.get_device_capability(index))
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with torch.cuda.device(index):
        _make_current(index)
        _check(_driver().cuModuleLoadData(ctypes.byref(module), cubin), "CUDA")
        _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, kernel.name.encode()), "CUDA")
        if shared_bytes:
            _check(_driver().cuFuncSetAttribute(function, _MOST_DYNAMIC_SHARED, shared_bytes), "CUDA")
    return function


def launch_on(
    index: int,
    kernel: CudaKernel,
    grid: Sequence[int],
    block: Sequence[int],
    values: Sequence[float],
    shared_bytes: int = 0,
) -> None:
    """Launch on the current stream of the GPU ``index``, which need not be the current device."""
    if torch.cuda.current_device() != index:
        with torch.cuda.device(index):
            launch_on(index, kernel, grid, block, values, shared_bytes)
        return
    function, stream = function_on(kernel, index, shared_bytes), torch._C._cuda_getCurrentRawStream(index)
    sizes, pointers = (*padded_to_3d(grid), *padded_to_3d(block)), packed_arguments(kernel, values)
    _make_current(index)
    _check(_launch_kernel()(function, *sizes, shared_bytes, stream, pointers, None), "CUDA")


@functools.cache
def _launch_kernel() -> Any:
    launch = _driver().cuLaunchKernel
    launch.argtypes = (ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3)
    return launch


def packed_arguments(kernel: CudaKernel, values: Sequence[float]) -> ctypes.Array[ctypes.c_void_p]:
    """Pack the values of the arguments for C and return pointers to them, valid until this thread's next call."""
    thread, buffers = threading.get_ident(), kernel.argument_buffers
    packing, memory, pointers = buffers.get(thread) or buffers.setdefault(thread, _argument_buffer_of(kernel))
    packing.pack_into(memory, 0, *values)
    return pointers


def _argument_buffer_of(kernel: CudaKernel) -> ArgumentBuffer:
    """The ``struct`` that packs a kernel's arguments, eight bytes each; memory for them; and pointers into it."""
    packing = struct.Struct("=" + "".join("Q" if each.is_pointer else _PACKED[each.type] for each in kernel.parameters))
    memory = ctypes.create_string_buffer(packing.size)
    start = ctypes.addressof(memory)
    return packing, memory, (ctypes.c_void_p * len(kernel.parameters))(*range(start, start + packing.size, 8))


def padded_to_3d(sizes: Sequence[int]) -> tuple[int, ...]:
    """Pad the sizes of a grid or a block with ones to three dimensions."""
    return (*sizes, 1, 1)[:3]


def _make_current(index: int) -> None:
    """Make the device's primary context current in this thread: the driver needs one, and torch sets it lazily."""
    _check(_driver().cuCtxSetCurrent(_primary_context(index)), "CUDA")


@functools.cache
def _primary_context(index: int) -> ctypes.c_void_p:
    device, context = ctypes.c_int(), ctypes.c_void_p()
    _check(_driver().cuDeviceGet(ctypes.byref(device), index), "CUDA")
    _check(_driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "CUDA")
    return context


def _check(result: int, library: str) -> None:
    if result:
        raise RuntimeError(f"{library} failed with error {result}")
