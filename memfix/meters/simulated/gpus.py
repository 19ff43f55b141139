"""GPU descriptions: the few facts by which torch's kernels choose how much memory they take."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError, did_you_mean
from ...units import GiB


@dataclass(frozen=True)
class GPU:
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    memory_bytes: int


H200 = GPU("H200", capability=(9, 0), multiprocessors=132, threads_per_multiprocessor=2048, memory_bytes=141 * GiB)

_KNOWN = {gpu.name: gpu for gpu in (H200,)}


def get_gpu(name: str) -> GPU:
    if name not in _KNOWN:
        raise UsageError(f"unknown GPU {name!r}{did_you_mean(name, _KNOWN)}")
    return _KNOWN[name]
