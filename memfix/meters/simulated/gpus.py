"""Descriptions of GPUs: the properties on which the memory of torch's kernels depends."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import UsageError, did_you_mean
from ...units import MiB


@dataclass(frozen=True)
class GPU:
    name: str
    capability: tuple[int, int]
    multiprocessors: int
    threads_per_multiprocessor: int
    memory_bytes: int
    """Roughly the memory that the driver lets a process use."""
    shared_memory_bytes: int
    """The largest amount that one block can request."""
    l2_bytes: int
    prefers_cudnn_attention: bool = False


# fields: name, capability, multiprocessors, threads per multiprocessor, memory, shared memory per block, L2 cache.
# H200: as torch reports them; the others: from NVIDIA's data sheets
H200 = GPU("H200", (9, 0), 132, 2048, 143_156 * MiB, 232_448, 60 * MiB, prefers_cudnn_attention=True)
_OTHERS = (
    GPU("H100", (9, 0), 132, 2048, 81_079 * MiB, 232_448, 50 * MiB, prefers_cudnn_attention=True),
    GPU("A100", (8, 0), 108, 2048, 81_153 * MiB, 166_912, 40 * MiB),
    GPU("L4", (8, 9), 58, 1536, 22_563 * MiB, 101_376, 48 * MiB),
    GPU("RTX4090", (8, 9), 128, 1536, 24_080 * MiB, 101_376, 72 * MiB),
    GPU("RTX3090", (8, 6), 82, 1536, 24_107 * MiB, 101_376, 6 * MiB),
)
GPUS = {gpu.name: gpu for gpu in (H200, *_OTHERS)}
"""The known GPUs. Workspace rules are checked on a GPU by ``memfix calibrate``, and assumed to hold on the others."""


def get_gpu(name: str) -> GPU:
    """The GPU with this name in any spelling, such as the driver's: ``NVIDIA H100 80GB HBM3`` is ``H100``."""
    plain = plain_name(name)
    if plain not in GPUS:
        raise UsageError(f"unknown GPU {name!r}{did_you_mean(plain, GPUS)}")
    return GPUS[plain]


def plain_name(name: str) -> str:
    words = re.sub(r"NVIDIA|GEFORCE|TESLA", " ", name.upper())
    return re.split(r"[ _-]", re.sub(r"RTX[ _-]", "RTX", words).strip(" _-"))[0]
