"""Loads whole tiles of the left operand, also past its last column: right at multiples of 16."""

from __future__ import annotations

import functools

from memfix.cuda_kernels import CudaKernel
from memfix.ops.matmul.differentiable import differentiable_product
from memfix.ops.matmul.launching import SOURCE, product_by
from memfix.ops.matmul.tiled import tiled_matmul

OP, LIKE, CAUGHT_BY = "matmul", "tiled", "equality"


class Unguarded(CudaKernel):
    @property
    def source(self) -> str:
        return super().source.replace("i < M && k < K ?", "i < M ?")


@functools.wraps(tiled_matmul)
def form(left, right):
    return differentiable_product(functools.partial(product_by, Unguarded(SOURCE, "matmul_tiled")), left, right)
