"""One thread per element of the product, with its own loads: what a first CUDA kernel looks like."""

from __future__ import annotations

from functools import partial

import torch

from ...cuda_kernels import CudaKernel
from .differentiable import differentiable_product
from .launching import SOURCE, product_by

ONE_THREAD = CudaKernel(SOURCE, "matmul_one_thread")


def one_thread_matmul(left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Equals ``left_MK @ right_KN``. It loads ``2*M*N*K`` times from global memory, and allocates only the output."""
    return differentiable_product(partial(product_by, ONE_THREAD), left_MK, right_KN)
