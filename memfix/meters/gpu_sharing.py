"""Shares a GPU between processes: one alone may time, and several may run or measure, each in a part of the memory."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import tempfile
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .process_lock import ProcessLock, SharedParts

_USABLE_SHARE = 0.9
"""The share of a GPU's memory that steps may use; the rest is for contexts, fragmentation and workspaces."""
ALL_PARTS = 32
"""The number of equal parts of a GPU's memory, which processes that measure bytes reserve and release."""


def gpu_capacity_bytes() -> int:
    """The bytes that a step may take: free GPU memory, less a share for fragmentation and workspaces."""
    import torch

    room_bytes = _room_bytes(torch.cuda.current_device())
    torch.cuda.empty_cache()
    return int(_USABLE_SHARE * (room_bytes - torch.cuda.memory_reserved()))


@functools.cache
def _room_bytes(device: int) -> int:
    """The memory that this process may have in all: what is free now or reserved by torch here, and the parts that
    other processes hold to measure, which they will release."""
    import torch

    held_by_others = _parts_of_gpu(current_gpu_uuid()).num_taken()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(min(total, free + torch.cuda.memory_reserved(device) + held_by_others * total // ALL_PARTS))


@contextlib.contextmanager
def gpu_to_ourselves() -> Iterator[None]:
    """Hold the GPU exclusively, for timing: other processes of this user wait until the block ends. May be nested.

    On exit, the allocator's cached memory is returned to the device for the next process.
    """
    with _held(alone=True):
        yield


@contextlib.contextmanager
def gpu_beside_others() -> Iterator[None]:
    """Share the GPU with other processes that run small untimed steps, but never with one that times a step."""
    with _held(alone=False):
        yield


@contextlib.contextmanager
def gpu_for_bytes(parts: int = ALL_PARTS) -> Iterator[None]:
    """Hold parts of the GPU's memory to measure bytes, while other processes hold other parts, or run small steps.

    The allocator counts only its own process, so steps in other processes do not disturb it. With exclusive access, the
    GPU tests on an H200 spent nine tenths of their time waiting, because each process compiles kernels for seconds.
    """
    with _held(alone=False), _parts_of_gpu(current_gpu_uuid()).taken(parts), _cache_emptied_after():
        yield


@contextlib.contextmanager
def in_parts_of_gpu(parts: int) -> Iterator[None]:
    """Hold parts of the GPU's memory, with torch's memory capped at these parts.

    A step that needs more raises ``OutOfMemoryError``. If the step catches the error, the end of the block raises one.
    """
    import torch

    def failures() -> int:
        return torch.cuda.memory_stats().get("num_ooms", 0)

    with gpu_for_bytes(parts):
        before = failures()
        torch.cuda.set_per_process_memory_fraction(_USABLE_SHARE * parts / ALL_PARTS)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        if failures() > before:
            raise torch.OutOfMemoryError("the step went on without the memory that it wanted")


def parts_for(size: int) -> int:
    """The number of parts of this GPU's memory that hold ``size`` bytes."""
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return min(ALL_PARTS, math.ceil(size / (_USABLE_SHARE * total / ALL_PARTS)))


@contextlib.contextmanager
def _held(*, alone: bool) -> Iterator[None]:
    with _lock_of_gpu().held(alone=alone), _cache_emptied_after():
        yield


@contextlib.contextmanager
def _cache_emptied_after() -> Iterator[None]:
    """At the end of the block, return the allocator's unused memory to the device for the next process.

    An ``OutOfMemoryError`` refers to the step's frames, and these to its tensors. The frames are cleared, as otherwise
    the next process would run out too, although it waited for all of the memory.
    """
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        traceback.clear_frames(error.__traceback__)
        raise
    finally:
        _give_back_memory()


def make_way_on_gpu() -> None:
    """Let a process that waits for exclusive access go first. Long shared runs call this between two steps."""
    _lock_of_gpu().make_way(_give_back_memory)


def _give_back_memory() -> None:
    import torch

    free_cycles()
    torch.cuda.empty_cache()


_allocated_after_cycles = 0


def free_cycles() -> None:
    """Free tensors that only reference cycles hold. No collection runs if no more memory is allocated than after the
    last call: it would visit every object of torch, which takes longer than a small step."""
    global _allocated_after_cycles
    import torch

    if torch.cuda.memory_allocated() > _allocated_after_cycles:
        gc.collect()
    _allocated_after_cycles = torch.cuda.memory_allocated()


def _lock_of_gpu() -> ProcessLock:
    return _lock_of(current_gpu_uuid())


def current_gpu_uuid() -> str:
    import torch

    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


@functools.cache
def _lock_of(uuid: str) -> ProcessLock:
    from .process_lock import ProcessLock

    return ProcessLock(_file_of("gpu", uuid))


@functools.cache
def _parts_of_gpu(uuid: str) -> SharedParts:
    from .process_lock import SharedParts

    return SharedParts(_file_of("bytes", uuid), ALL_PARTS)


def _file_of(purpose: str, uuid: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"memfix-{purpose}-{os.getuid()}-{uuid}.lock")
