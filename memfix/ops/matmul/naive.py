"""The references: torch's own product, which is cuBLAS on a GPU, and a fold of ``torch.fmax``."""

# M rows, N columns, K terms of a product; R rows, C columns of a reduction

from __future__ import annotations

import functools

import torch


def naive_matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` with the digits of float32: torch rounds to TF32 only if it is told to."""
    return left_MK @ right_KN


def naive_row_max(x_RC: torch.Tensor) -> torch.Tensor:
    """Fold ``fmax`` over the columns, starting from -inf. It skips NaN, where ``amax`` would return NaN."""
    start_R = torch.full_like(x_RC[:, 0], float("-inf"))
    return functools.reduce(torch.fmax, x_RC.unbind(1), start_R)
