"""Starts each segment of a sequence one chunk earlier from a zero state, even if the gates retain an older state."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST, ALTERED = "#define FORGOTTEN -40.0f", "#define FORGOTTEN 1e30f"

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "scan"))
