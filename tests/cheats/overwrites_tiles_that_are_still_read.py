"""Lacks the barrier after the products of a tile: the next tile is loaded while threads still read this one."""

from __future__ import annotations

import functools

from memfix.ops.matmul.differentiable import differentiable_product
from memfix.ops.matmul.launching import SOURCE, product_by
from memfix.ops.matmul.tiled import tiled_matmul
from tests.altered_kernel import AlteredKernel

OP, LIKE, CAUGHT_BY = "matmul", "tiled", "equality"
HONEST, ALTERED = "b_tile[step][x];\n        __syncthreads();", "b_tile[step][x];"


@functools.wraps(tiled_matmul)
def form(left, right):
    return differentiable_product(
        functools.partial(product_by, AlteredKernel(SOURCE, "matmul_tiled", HONEST, ALTERED)), left, right
    )
