"""Memory layout of tensors: the checks that torch's kernels make before they copy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, size) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def is_contiguous(shape: Sequence[int], strides: Sequence[int]) -> bool:
    return all(
        size == 1 or stride == expected
        for size, stride, expected in zip(shape, strides, contiguous_strides(shape), strict=True)
    )


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    axes = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    step = 1
    for stride, size in axes:
        if stride != step:
            return False
        step *= size
    return True


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a result that keeps the input's order of dimensions, without gaps."""
    if is_dense(tensor.shape, tensor.stride()):
        return tuple(tensor.stride())
    return tuple(torch._prims_common.compute_elementwise_output_strides(tensor))


def strides_with_last(shape: Sequence[int], strides: Sequence[int], last: int) -> tuple[int, ...]:
    """Dense strides in which dimension ``last`` runs fastest and the others keep their order."""
    outer_first = sorted(range(len(shape)), key=lambda dim: 1 if dim == last else -strides[dim])
    found, step = [0] * len(shape), 1
    for dim in reversed(outer_first):
        found[dim] = step
        step *= shape[dim]
    return tuple(found)


def merges_into_one(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether a single stride reaches the elements of all these dimensions in order."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size != 1]
    return all(stride == size * inner for (_, stride), (size, inner) in itertools.pairwise(axes))


def flattens_without_copy(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.reshape(-1)`` is a view."""
    return tensor.numel() == 0 or merges_into_one(tensor.shape, tensor.stride())


def meta_like(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape, strides and dtype."""
    return torch.empty_strided(tuple(tensor.shape), tuple(tensor.stride()), dtype=tensor.dtype, device="meta")


def extent(tensor: torch.Tensor) -> int:
    """The number of elements in memory from the first to the last, gaps included."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def same_dense_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether one ``memcpy`` can copy the elements of ``b`` to ``a``."""
    if a.shape != b.shape:
        return a.numel() == 1 == b.numel()
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or one == other for size, one, other in strides) and is_dense(a.shape, a.stride())


def is_row_major(matrix: torch.Tensor) -> bool:
    rows_apart, columns_apart = matrix.stride()[-2:]
    return columns_apart == 1 and rows_apart >= max(1, matrix.shape[-1])


def is_column_major(matrix: torch.Tensor) -> bool:
    rows_apart, columns_apart = matrix.stride()[-2:]
    return rows_apart == 1 and columns_apart >= max(1, matrix.shape[-2])
