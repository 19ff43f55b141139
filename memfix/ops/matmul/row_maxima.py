"""Finds the largest number of each row by one thread block per row, with ``fmaxf``."""

# R rows, C columns

from __future__ import annotations

import torch

from ...cuda_kernels import CudaKernel
from ..arguments import require_shape
from .launching import SOURCE

ROW_MAX = CudaKernel(SOURCE, "row_max")
THREADS = 256
"""Threads of a block, as in ``matmul.cu``."""


def cuda_row_max(x_RC: torch.Tensor) -> torch.Tensor:
    """Equals a fold of ``torch.fmax`` over the columns, starting from -inf. It allocates only the output."""
    require_shape("x", x_RC, "R C")
    if x_RC.dtype != torch.float32:
        raise ValueError(f"x must be float32, got {x_RC.dtype}")
    if x_RC.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("row_max has no gradient; detach x, or use torch.amax where there is no NaN")
    out_R = x_RC.new_empty(x_RC.shape[0])
    if out_R.numel():
        ROW_MAX.launch((x_RC.shape[0],), (THREADS,), x_RC, out_R, x_RC.shape[1], *x_RC.stride())
    return out_R
