"""Lets autograd run on fake ``cuda`` tensors in a torch that was built without CUDA, or that finds no GPU.

FakeTensorMode alone is not enough there. A CPU wheel has no device guard for CUDA, so the first autograd node on a
fake cuda tensor aborts the process; and libtorch's CUDA hooks report that no accelerator exists. Both are process-wide
tables with exported symbols, so ctypes can patch them without a compiler. A mistake here would abort the process, so
a self-test in a child process comes first.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...atomic_write import write_whole
from ...errors import UsageError
from ...versions import torch_range

_PROBE = """
import torch
from memfix.meters.simulated import fake_device
fake_device.install()
from torch._subclasses.fake_tensor import FakeTensorMode
with FakeTensorMode():
    weight = torch.empty(4, 3, device="cuda", requires_grad=True)
    (torch.empty(2, 4, device="cuda") @ weight).relu().sum().backward()
    assert weight.grad.device.type == "cuda"
print("fake-device-works", flush=True)
from memfix.meters.simulated.environment import simulated_gpu
from memfix.meters.simulated.gpus import H200
with simulated_gpu(H200, hides_modes=True) as tracker:
    table, rows = torch.empty(1000, device="cuda", requires_grad=True), torch.empty(2, dtype=torch.int64, device="cuda")
    picked = table[rows].sum()
    tracker.ledger.restart()
    picked.backward()
    assert tracker.ledger.requested.peak < tracker.ledger.requested.base + 2 * 4000, "backward wrote a second tensor"
print("hiding-modes-works", flush=True)
"""
_PROBE_TIMEOUT_S = 120

_CUDA_GUARD_SLOT = 1  # c10::DeviceType::CUDA in the guard registry
# slots in CUDAHooksInterface's virtual table; in the Itanium ABI the first two are destructors
_HOOK_IS_BUILT, _HOOK_HAS_PRIMARY_CONTEXT = 2, 4
_TABLE_LENGTH = 64


@dataclass(frozen=True)
class SelfTest:
    """The result of the self-test. ``no_device`` and ``cannot_hide_modes`` say why a part failed; None if it passed."""

    no_device: str | None
    cannot_hide_modes: str | None
    is_final: bool = True
    """False if the self-test did not finish: a busy machine can be the cause, so the result is not cached."""


def unavailable_reason() -> str | None:
    """Why this process cannot have fake CUDA tensors; None if it can."""
    return self_test().no_device


@functools.cache
def self_test() -> SelfTest:
    """The result of the self-test, cached on disk for this build of torch and this version of the source."""
    import torch

    if sys.platform == "win32" and not torch.cuda.is_available():
        reason = "a torch without CUDA cannot fake it on Windows; install a CUDA build of torch (no GPU is needed)"
        return SelfTest(reason, reason)
    cached = _cache_file(torch.__file__, torch.__version__)
    try:
        return SelfTest(**json.loads(cached.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    found = _probe_in_child()
    if not found.is_final:
        return found
    with contextlib.suppress(OSError, UsageError):  # without a writable cache directory the self-test runs each time
        write_whole(cached, json.dumps(asdict(found)), "the self-test's verdict")
    return found


def _cache_file(torch_file: str, version: str) -> Path:
    library = Path(torch_file).parent / "lib" / "libc10.so"
    stamp = library.stat().st_mtime_ns if library.exists() else 0
    own_source = "".join(
        (Path(__file__).parent / name).read_text() for name in ("fake_device.py", "hide_dispatch_modes.py")
    )
    key = hashlib.sha256(f"{torch_file} {version} {stamp} {own_source}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "memfix" / f"fake-device-{key}.json"


def _probe_in_child() -> SelfTest:
    package_root = str(Path(__file__).resolve().parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")]),
    }
    way_out = f"use torch {torch_range()} on Linux or macOS, or measure on a GPU with --meter=cuda"
    try:
        child = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            env=environment,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = f"the self-test of fake CUDA tensors did not finish ({type(error).__name__}); try again, or {way_out}"
        return SelfTest(reason, reason, is_final=False)
    last_words = (child.stderr.strip().splitlines() or ["no output"])[-1][:200]
    failed = f"self-test exit {child.returncode}: {last_words}"
    if "fake-device-works" not in child.stdout:
        reason = f"this torch cannot hold fake CUDA tensors ({failed}); {way_out}"
        return SelfTest(reason, reason)
    if "hiding-modes-works" not in child.stdout:
        return SelfTest(None, f"in-place steps of libtorch's formulas are counted as new tensors here ({failed})")
    return SelfTest(None, None)


@functools.cache
def install() -> None:
    """Make fake cuda tensors safe for autograd in this process. Call it only if the self-test passed."""
    import torch

    if torch.cuda.is_available():
        return
    library = Path(torch.__file__).parent / "lib"
    suffix = "dylib" if sys.platform == "darwin" else "so"
    c10 = ctypes.CDLL(str(library / f"libc10.{suffix}"))
    libtorch = ctypes.CDLL(str(library / f"libtorch_cpu.{suffix}"))
    returns_zero = _returns_zero()
    _install_device_guard(c10, returns_zero)
    # libtorch calls this hook at every operator, and a C function is far faster than a Python callback
    returns_one = _address(ctypes.pythonapi.Py_IsInitialized)
    _patch_cuda_hooks(libtorch, is_built=returns_one, has_primary_context=returns_zero)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        raise RuntimeError(f"libtorch still reports accelerator {accelerator} after its CUDA hooks were patched")


def _keep_forever(*objects: object) -> None:
    """Leak a reference to each object: libtorch follows pointers to them at exit, when Python has freed its objects."""
    for thing in objects:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _returns_zero() -> int:
    """The address of a C function that returns 0 for any arguments."""
    signature = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_void_p)
    function = signature(lambda _: 0)
    _keep_forever(function)
    return _address(function)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address


def _install_device_guard(c10: ctypes.CDLL, returns_zero: int) -> None:
    """Make libtorch register its own fake CUDA guard.

    ``_ensureCUDADeviceGuardSet`` replaces only a registered CUDA guard that counts no devices. A CPU wheel has no CUDA
    guard, so an object whose every method returns 0 is registered first.
    """
    import torch

    registry = (ctypes.c_void_p * 8).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    stand_in = None
    if not registry[_CUDA_GUARD_SLOT]:
        table = (ctypes.c_void_p * 128)(*([returns_zero] * 128))
        guard = (ctypes.c_void_p * 4)(ctypes.addressof(table))
        _keep_forever(table, guard)
        stand_in = ctypes.addressof(guard)
        registry[_CUDA_GUARD_SLOT] = stand_in
    torch._C._ensureCUDADeviceGuardSet()
    if stand_in is not None and registry[_CUDA_GUARD_SLOT] == stand_in:
        registry[_CUDA_GUARD_SLOT] = None
        raise RuntimeError("libtorch did not replace the stand-in device guard by its fake CUDA guard")


def _patch_cuda_hooks(libtorch: ctypes.CDLL, *, is_built: int, has_primary_context: int) -> None:
    """Give libtorch's CUDAHooksInterface object a copy of its virtual table with two methods replaced.

    The fake guard counts eight devices, and backward asks for each whether it has a primary context: the answer is no.
    """
    get_hooks = libtorch._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype, get_hooks.argtypes = ctypes.c_void_p, []
    pointer_to_table = ctypes.c_void_p.from_address(get_hooks())
    header = 2  # offset-to-top and type information lie before the address that the object points to
    assert pointer_to_table.value is not None
    whole_table = ctypes.c_void_p * (_TABLE_LENGTH + header)
    word = ctypes.sizeof(ctypes.c_void_p)
    copy = whole_table(*whole_table.from_address(pointer_to_table.value - header * word))
    copy[header + _HOOK_IS_BUILT] = is_built
    copy[header + _HOOK_HAS_PRIMARY_CONTEXT] = has_primary_context
    _keep_forever(copy)
    pointer_to_table.value = ctypes.addressof(copy) + header * word
