"""Lacks the barrier after the products of a tile: the next tile is loaded while threads still read this one."""

from __future__ import annotations

from tests.altered_kernel import altered_matmul

OP, LIKE, CAUGHT_BY = "matmul", "tiled", "equality"

form = altered_matmul("b_tile[step][x];\n        __syncthreads();", "b_tile[step][x];")
