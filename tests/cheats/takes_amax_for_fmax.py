"""Uses ``amax`` instead of a fold with ``fmax``: they differ for NaN only."""

from __future__ import annotations

import functools

from memfix.ops.matmul.row_maxima import cuda_row_max

OP, LIKE, CAUGHT_BY = "row_max", "cuda", "equality"


@functools.wraps(cuda_row_max)
def form(x):
    return x.amax(1)
