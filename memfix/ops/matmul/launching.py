"""Launches the kernels of ``matmul.cu``."""

# M rows, N columns, K terms

from __future__ import annotations

from pathlib import Path

import torch

from ...cuda_kernels import CudaKernel
from ..launches import num_tiles

SOURCE = Path(__file__).with_name("matmul.cu")
TILE = 16
"""Threads of a block in each dimension, as in ``matmul.cu``."""
MOST_BLOCKS = 65_535
"""CUDA's limit of ``gridDim.y``."""


def product_by(kernel: CudaKernel, left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` by a kernel with one thread per element, which takes strides, so nothing is copied."""
    (M, K), N = left_MK.shape, right_KN.shape[1]
    if M > TILE * MOST_BLOCKS:
        raise ValueError(f"the product must have at most {TILE * MOST_BLOCKS:,} rows, got {M:,}; use torch.matmul")
    out_MN = left_MK.new_empty(M, N)
    grid = num_tiles(N, TILE), num_tiles(M, TILE)
    if out_MN.numel():
        kernel.launch(
            grid, (TILE, TILE), left_MK, right_KN, out_MN, M, N, K, *left_MK.stride(), *right_KN.stride()
        )  # fmt: skip
    return out_MN
