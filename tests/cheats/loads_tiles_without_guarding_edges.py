"""Loads whole tiles of the left operand past its last column: right at multiples of 16 only."""

from __future__ import annotations

from tests.altered_kernel import altered_matmul

OP, LIKE, CAUGHT_BY = "matmul", "tiled", "equality"

form = altered_matmul("i < M && k < K ?", "i < M ?")
