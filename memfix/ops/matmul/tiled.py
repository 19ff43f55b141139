"""Tiles of 16 x 16 in shared memory: each element is loaded once for 16 threads."""

from __future__ import annotations

from functools import partial

import torch

from ...cuda_kernels import CudaKernel
from .differentiable import differentiable_product
from .launching import SOURCE, product_by

TILED = CudaKernel(SOURCE, "matmul_tiled")


def tiled_matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Equals ``left_MK @ right_KN``. It makes ``2*M*N*K/16`` loads from global memory where sizes are multiples of 16,
    each of 4 sectors a warp, and takes 2,048 bytes of shared memory a block, and no memory but the output."""
    return differentiable_product(partial(product_by, TILED), left_MK, right_KN)
