"""Loads whole tiles of the left operand past its last column: right at multiples of 16 only."""

from __future__ import annotations

import functools

from memfix.ops.matmul.differentiable import differentiable_product
from memfix.ops.matmul.launching import SOURCE, product_by
from memfix.ops.matmul.tiled import tiled_matmul
from tests.altered_kernel import AlteredKernel

OP, LIKE, CAUGHT_BY = "matmul", "tiled", "equality"
HONEST, ALTERED = "i < M && k < K ?", "i < M ?"


@functools.wraps(tiled_matmul)
def form(left, right):
    return differentiable_product(
        functools.partial(product_by, AlteredKernel(SOURCE, "matmul_tiled", HONEST, ALTERED)), left, right
    )
