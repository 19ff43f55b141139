"""Reads the result of a warpgroup's asynchronous product without waiting for it: a race on a GPU."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST, ALTERED = "        await_wgmma<0>(sums, grad);\n", ""

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "scan_both_ways"))
