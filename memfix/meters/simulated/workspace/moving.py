"""Copies between GPU and host: if one ``memcpy`` is not enough, a contiguous tensor on the GPU is used for staging."""

from __future__ import annotations

from typing import Any

import torch

from .layout import is_dense, same_dense_layout
from .rules import Call, rule


@rule("copy_")
def _copy(call: Call) -> list[int]:
    return cross_device_copy_buffers(call["self"], call["src"], call["non_blocking"])


@rule("_to_copy")
def _to_copy(call: Call) -> list[int]:
    result: Any = call.outputs
    if not isinstance(result, torch.Tensor):
        return []
    return cross_device_copy_buffers(result, call["self"], call["non_blocking"])


def cross_device_copy_buffers(to: torch.Tensor, source: torch.Tensor, non_blocking: bool) -> list[int]:
    """The staging buffers on the GPU. The dtype is cast on the host, or on the GPU if the copy is non-blocking."""
    if to.device.type == source.device.type or to.numel() == 0:
        return []
    same_dtype = to.dtype == source.dtype
    if same_dtype and same_dense_layout(to, source):
        return []
    if to.device.type == "cuda":
        if non_blocking:
            return [] if to.is_contiguous() and same_dtype else [to.numel() * source.element_size()]
        return [] if to.is_contiguous() else [to.numel() * to.element_size()]
    if source.device.type != "cuda":
        return []
    contiguous = source.shape == to.shape and source.is_contiguous()
    if not non_blocking or same_dtype:
        return [] if contiguous else [to.numel() * source.element_size()]
    cast = [source.numel() * to.element_size()]
    stays_transposed = source.shape != to.shape or (is_dense(source.shape, source.stride()) and not contiguous)
    return [*cast, *([to.numel() * to.element_size()] if stays_transposed else [])]
