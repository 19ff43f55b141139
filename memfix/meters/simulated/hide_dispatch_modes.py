"""Hides dispatch modes and tensor subclasses from libtorch, so that it takes the same code paths as without them.

Libtorch checks in a hundred places whether a dispatch mode is active or a tensor is a Python subclass. If so, it takes
a path without in-place steps, which allocates more. This module makes both checks return False, while every operator
still reaches the modes: it replaces the function ``c10::impl::dispatch_mode_enabled`` in libtorch_cpu's import table,
and gives fake tensors their Python key only while FakeTensorMode runs. It works on Linux only; the self-test of
``fake_device`` tries it first in a child process.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import operator
import re
import struct
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

_CHECK = b"_ZN3c104impl21dispatch_mode_enabledEv"
_CALLER = "libtorch_cpu.so"
_GPU = torch.device("cuda", 0)

_PYTHON_KEY = torch._C.DispatchKeySet(torch._C.DispatchKey.Python).raw_repr()
_ALL_BITS = (1 << 64) - 1
_DEVICE = 0xFFFF << 16  # type and index of a tensor's device, in the word before its dispatch keys
_CUDA_0 = 1 << 16  # c10::DeviceType::CUDA, index 0
_Word = ctypes.c_uint64
_Words = _Word * 2
_CPU, _META, _ASKING, _PLAIN = range(4)
_NUM_SAMPLES = 16
_hidden: dict[int, weakref.ref[FakeTensor]] = {}
"""Tensors without their Python key, by ``id``. Those that outlive the simulation get the key back when it ends."""


def show_python_key(tensors: Iterable[torch.Tensor]) -> None:
    """Give fake tensors their Python key back, which FakeTensorMode needs."""
    layout = _layout()
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            words = _Words.from_address(tensor._cdata + layout.offset)
            words[1] |= _PYTHON_KEY
            if layout.asks_python and words[0] & _DEVICE == _CUDA_0:
                words[0] = words[0] & ~_DEVICE | layout.meta | layout.asks_python


def hide_python_key(tensors: Iterable[torch.Tensor]) -> None:
    """Make fake tensors look like plain CUDA tensors to libtorch. Modes still see their operators.

    A fake tensor asks Python for its device, which libtorch reads several times an operator. Tensors on the GPU
    therefore get the device ``cuda:0`` in C++.
    """
    layout = _layout()
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            _hidden[id(tensor)] = weakref.ref(tensor)
            words = _Words.from_address(tensor._cdata + layout.offset)
            words[1] &= _ALL_BITS ^ _PYTHON_KEY
            if words[0] & layout.asks_python and tensor.fake_device == _GPU:
                words[0] = words[0] & ~(_DEVICE | layout.asks_python) | _CUDA_0


@contextlib.contextmanager
def python_keys_shown(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, those of the tensors whose Python key is hidden have it, so that code may run operators on them."""
    hidden = [tensor for tensor in tensors if id(tensor) in _hidden]
    show_python_key(hidden)
    try:
        yield
    finally:
        hide_python_key(hidden)


@contextlib.contextmanager
def moved_to(device: torch.device, *tensors: Any) -> Iterator[None]:
    """Inside, the tensors have their Python keys; afterwards they are on ``device``. The last one says whether keys are
    hidden: another may have been swapped, and is then unknown here."""
    is_hidden = id(tensors[-1]) in _hidden
    show_python_key(tensors)
    yield
    for tensor in tensors:
        tensor.fake_device = device
    if is_hidden:
        hide_python_key(tensors)


@contextlib.contextmanager
def installed(
    num_own_modes: int, on_other_mode: Callable[[], None], is_compiling: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Inside, libtorch sees no active dispatch mode unless more than ``num_own_modes`` are active.

    Further modes are the user's, and ``on_other_mode`` is called when libtorch sees one. While ``is_compiling()``, all
    active modes belong to a compiler and are shown.
    """

    def is_other_mode_active() -> bool:
        if is_compiling():
            return torch._C._len_torch_dispatch_stack() > 0
        if torch._C._len_torch_dispatch_stack() <= num_own_modes:
            return False
        on_other_mode()
        return True

    replacement = ctypes.CFUNCTYPE(ctypes.c_bool)(is_other_mode_active)
    slot = ctypes.c_void_p.from_address(_import_slot())
    before, slot.value = slot.value, ctypes.cast(replacement, ctypes.c_void_p).value
    try:
        yield
    finally:
        slot.value = before
        show_python_key(tensor for kept in _hidden.values() if (tensor := kept()) is not None)
        _hidden.clear()


@dataclass(frozen=True)
class _Layout:
    """The place and the bits of the 64-bit word just before the dispatch keys in a tensor's C++ object."""

    offset: int
    asks_python: int
    """The flag bits of a tensor that asks Python for its device; 0 if the word looks unfamiliar, and is left alone."""
    meta: int
    """The device bits of a meta tensor."""


@functools.cache
def _layout() -> _Layout:
    """Find the layout by comparing tensors that differ in one property. It takes many samples of each kind, because
    libtorch leaves some bits of the word uninitialised."""
    with _disable_current_modes():
        samples = [_one_of_each_kind() for _ in range(_NUM_SAMPLES)]
    keys = torch._C._dispatch_keys(samples[0][_CPU]).raw_repr()
    found = [
        offset
        for offset in range(8, 320, 8)
        if all(_Word.from_address(tensors[_CPU]._cdata + offset).value == keys for tensors in samples)
    ]
    if len(found) != 1:
        raise RuntimeError(f"the dispatch keys of a tensor lie at one of {found}")
    offset = found[0] - 8
    always, ever = [], []
    for tensors in zip(*samples, strict=True):
        words = [_Word.from_address(tensor._cdata + offset).value for tensor in tensors]
        always.append(functools.reduce(operator.and_, words))
        ever.append(functools.reduce(operator.or_, words))

    def only_in(kind: int, other: int) -> int:
        return always[kind] & ~ever[other]

    of_device = only_in(_CPU, _META) | only_in(_META, _CPU)
    asks_python = only_in(_ASKING, _PLAIN)
    is_as_expected = not of_device & ~_DEVICE and not asks_python & _DEVICE and not only_in(_PLAIN, _ASKING)
    return _Layout(offset, asks_python if is_as_expected else 0, always[_META] & _DEVICE)


def _one_of_each_kind() -> tuple[torch.Tensor, ...]:
    """Tensors of the kinds ``_CPU``, ``_META``, ``_ASKING`` and ``_PLAIN``."""
    cpu, meta = torch.empty(1), torch.empty(1, device="meta")
    fakes = (
        torch.Tensor._make_subclass(FakeTensor, meta, False, dispatch_device=asks, device_for_backend_keys=_GPU)
        for asks in (True, False)
    )
    return cpu, meta, *fakes


# ---------------------------------------------------------------- finding the import slot in the loaded library
_PROGRAM_DYNAMIC = 2
_STRINGS, _STRINGS_SIZE, _SYMBOLS, _RELOCATIONS, _RELOCATIONS_SIZE = 5, 10, 6, 7, 8
_PLT_RELOCATIONS, _PLT_RELOCATIONS_SIZE = 23, 2
_SYMBOL_WORDS = 6


@functools.cache
def _import_slot() -> int:
    """Make the pointer writable through which libtorch_cpu calls ``dispatch_mode_enabled``, and return its address."""
    if sys.platform != "linux":
        raise RuntimeError(f"only known on Linux, not on {sys.platform}")
    base, dynamic_section = _loaded()
    tables = _tagged_values(dynamic_section)

    def absolute(address: int) -> int:
        return address if address >= base else base + address

    strings = ctypes.string_at(absolute(tables[_STRINGS]), tables[_STRINGS_SIZE])
    # several offsets: linkers store a name that is the suffix of a longer name only once
    names = {found.start() for found in re.finditer(re.escape(_CHECK) + b"\0", strings)}
    symbols = ctypes.cast(absolute(tables[_SYMBOLS]), ctypes.POINTER(ctypes.c_uint32))
    for where, size in ((_PLT_RELOCATIONS, _PLT_RELOCATIONS_SIZE), (_RELOCATIONS, _RELOCATIONS_SIZE)):
        if where not in tables:
            continue
        relocations = ctypes.string_at(absolute(tables[where]), tables[size])
        for offset, info, _ in struct.iter_unpack("<QQq", relocations):
            if info >> 32 and symbols[(info >> 32) * _SYMBOL_WORDS] in names:
                _make_writable(base + offset)
                return base + offset
    raise RuntimeError(f"{_CALLER} does not import {_CHECK.decode()}")


class _Program(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("offset", _Word), ("address", _Word),
        ("physical", _Word), ("bytes_in_file", _Word), ("bytes_in_memory", _Word), ("alignment", _Word),
    )  # fmt: skip


class _Library(ctypes.Structure):
    _fields_ = (
        ("base", _Word), ("name", ctypes.c_char_p),
        ("programs", ctypes.POINTER(_Program)), ("num_programs", ctypes.c_uint16),
    )  # fmt: skip


def _loaded() -> tuple[int, int]:
    """The load address of libtorch_cpu (the offset of the addresses in its file), and that of its dynamic section."""
    found: list[tuple[int, int]] = []

    def look(library: ctypes._Pointer[_Library], _size: int, _data: object) -> int:
        seen = library.contents
        if seen.name.endswith(_CALLER.encode()):
            programs = seen.programs[: seen.num_programs]
            found.extend((seen.base, seen.base + each.address) for each in programs if each.kind == _PROGRAM_DYNAMIC)
        return len(found)

    visitor = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(_Library), ctypes.c_size_t, ctypes.c_void_p)
    ctypes.CDLL(None).dl_iterate_phdr(visitor(look), None)
    if not found:
        raise RuntimeError(f"{_CALLER} is not loaded")
    return found[0]


def _tagged_values(address: int) -> dict[int, int]:
    values: dict[int, int] = {}
    while True:
        tag, value = struct.unpack("<qQ", ctypes.string_at(address, 16))
        if tag == 0:
            return values
        values[tag] = value
        address += 16


def _make_writable(address: int) -> None:
    """Make the page of ``address`` writable: in some builds, the loader makes a library's import slots read-only."""
    page = address - address % mmap.PAGESIZE
    if ctypes.CDLL(None, use_errno=True).mprotect(
        ctypes.c_void_p(page), mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE
    ):
        raise RuntimeError(f"the import slot cannot be made writable: error {ctypes.get_errno()}")
