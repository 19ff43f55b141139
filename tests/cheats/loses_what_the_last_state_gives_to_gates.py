"""Leaves out of the gradients of gates what a chunk's last state gives to all of them."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST, ALTERED = "z.at(ROWS - 1, c) += r == 7 ? of_last : 0.0f;", ""

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "gradients"))
