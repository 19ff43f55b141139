"""Settings of the whole process that an op must leave as they were: a changed one changes every other op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.backends import cuda, cudnn


@contextlib.contextmanager
def settings_watched() -> Iterator[set[str]]:
    """Yield a set, to which the names of the settings are added that changed inside; set them back."""
    before = [get() for _, get, _ in _SETTINGS]
    changed: set[str] = set()
    try:
        yield changed
    finally:
        for (name, get, put), value in zip(_SETTINGS, before, strict=True):
            if not _same(get(), value):
                changed.add(name)
                put(value)


def _same(now: Any, before: Any) -> bool:
    return torch.equal(now, before) if isinstance(before, torch.Tensor) else before is None or now == before


def _cuda_random() -> torch.Tensor | None:
    return torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None


def _attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], None]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


_SETTINGS: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
    ("torch's random generator", torch.get_rng_state, torch.set_rng_state),
    ("torch's random generator on the GPU", _cuda_random, torch.cuda.set_rng_state),
    ("torch's default dtype", torch.get_default_dtype, torch.set_default_dtype),
    ("torch's number of threads", torch.get_num_threads, torch.set_num_threads),
    ("torch's anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    ("the precision of float32 products", torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    ("torch.backends.cudnn.allow_tf32", *_attribute(cudnn, "allow_tf32")),
    ("torch.backends.cudnn.benchmark", *_attribute(cudnn, "benchmark")),
    ("torch.backends.cuda.enable_flash_sdp", cuda.flash_sdp_enabled, cuda.enable_flash_sdp),
    ("torch.backends.cuda.enable_math_sdp", cuda.math_sdp_enabled, cuda.enable_math_sdp),
    ("torch.backends.cuda.enable_mem_efficient_sdp", cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp),
]
