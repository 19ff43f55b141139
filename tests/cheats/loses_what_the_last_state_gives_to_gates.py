"""Omits the contribution of a chunk's final state from the gradients of the gates."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST, ALTERED = "z.at(ROWS - 1, c) += lane >> 2 == 7 ? of_last : 0.0f;", ""

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "gradients"))
