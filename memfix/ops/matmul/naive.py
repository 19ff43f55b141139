"""What is true: torch's own product, cuBLAS on a GPU, and a fold of ``torch.fmax``."""

# M rows, N columns, K terms of a product; R rows, C columns of a reduction

from __future__ import annotations

import functools

import torch


def naive_matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """``left @ right``. The digits of float32 are kept: torch does not round to TF32 unless it is told to."""
    return left_MK @ right_KN


def naive_row_max(x_RC: torch.Tensor) -> torch.Tensor:
    """``fmax`` over the columns, from -inf on. ``amax`` is another function: a NaN wins there, and is dropped here."""
    start_R = torch.full_like(x_RC[:, 0], float("-inf"))
    return functools.reduce(torch.fmax, x_RC.unbind(1), start_R)
