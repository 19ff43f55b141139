"""Contiguous copies of images: kernels that take channels first or channels last copy whatever is neither."""

from __future__ import annotations

import torch
from torch._prims_common import suggest_memory_format

from .layout import extent
from .rules import Call, NoRule, size_of


def suggested_format(tensor: torch.Tensor) -> torch.memory_format:
    """What ``Tensor.suggest_memory_format`` answers inside torch: channels last by strides, else contiguous."""
    return suggest_memory_format(tensor)


def copies_unless_in(memory_format: torch.memory_format, *tensors: torch.Tensor | None) -> list[int]:
    """What ``.contiguous(memory_format)`` takes, tensor by tensor."""
    return [
        size_of(tensor)
        for tensor in tensors
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format)
    ]


def require_contiguous(call: Call, *names: str, memory_format: torch.memory_format = torch.contiguous_format) -> None:
    """Raise ``NoRule`` where an argument is strided otherwise: what the kernel then copies is not known."""
    for name in names:
        tensor = call[name]
        if tensor is not None and not tensor.is_contiguous(memory_format=memory_format):
            raise NoRule(f"{call.operator} of a {name} that is not contiguous, shape {list(tensor.shape)}")


def fits_32bit_indices(tensor: torch.Tensor) -> bool:
    """The question many kernels ask before they take their fast path."""
    return max(tensor.numel(), extent(tensor) - 1) < 2**31 - 1


def accumulator_bytes(dtype: torch.dtype) -> int:
    """Kernels sum half precision in float32, and anything wider in itself."""
    return max(dtype.itemsize, 4)
