"""How a tensor lies in memory: what decides whether a kernel can take it as it is."""

from __future__ import annotations

import torch


def is_dense(tensor: torch.Tensor) -> bool:
    """No gap and no overlap, in whatever order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def same_dense_layout(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Could one ``memcpy`` carry the elements of ``b`` to ``a``?"""
    if a.shape != b.shape:
        return a.numel() == 1 == b.numel()
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or one == other for size, one, other in strides) and is_dense(a)


def is_row_major(matrix: torch.Tensor) -> bool:
    rows_apart, columns_apart = matrix.stride()[-2:]
    return columns_apart == 1 and rows_apart >= max(1, matrix.shape[-1])


def is_column_major(matrix: torch.Tensor) -> bool:
    rows_apart, columns_apart = matrix.stride()[-2:]
    return rows_apart == 1 and columns_apart >= max(1, matrix.shape[-2])
