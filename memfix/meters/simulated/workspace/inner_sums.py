"""Sums that other operators make inside, of a temporary or of the result."""

from __future__ import annotations

import torch

from ..gpus import GPU
from .layout import extent
from .memory_formats import accumulator_bytes
from .rules import NoRule, size_of
from .split_reduction import Accumulator, partial_result_buffers


def buffers_of_sum(gpu: GPU, tensor: torch.Tensor, dims: list[int]) -> list[int]:
    """The buffers of ``tensor.sum(dims)`` or a mean besides the result, for a floating-point ``tensor``."""
    if max(size_of(tensor), (extent(tensor) - 1) * tensor.element_size()) >= 2**31:
        raise NoRule(f"a sum inside a kernel over {tensor.numel():,} elements, which torch cuts in pieces")
    accumulator = Accumulator(accumulator_bytes(tensor.dtype), (tensor.element_size(),), in_result=True)
    return partial_result_buffers(gpu, tensor, dims, accumulator)
