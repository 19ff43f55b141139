"""Which tensors vector loads and TMA can read: addresses that they accept are multiples of 16 bytes."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor

ALIGNED_BYTES = 16


def begins_aligned(tensor: torch.Tensor) -> bool:
    """Whether the first element is at such an address. A fake tensor's storage is taken to begin at one."""
    is_fake = isinstance(tensor, FakeTensor)
    address = tensor.storage_offset() * tensor.itemsize if is_fake else tensor.data_ptr()
    return address % ALIGNED_BYTES == 0


def has_aligned_rows(tensor: torch.Tensor) -> bool:
    """Whether every row along the last axis is contiguous and begins at such an address."""
    *steps, step_in_row = tensor.stride()
    are_apart = all(step * tensor.itemsize % ALIGNED_BYTES == 0 for step in steps)
    return step_in_row == 1 and are_apart and begins_aligned(tensor)


def with_aligned_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a contiguous copy. The size of a row must be a multiple of 16 bytes."""
    return tensor if has_aligned_rows(tensor) else tensor.clone(memory_format=torch.contiguous_format)
