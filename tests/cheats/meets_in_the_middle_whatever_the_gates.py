"""Refers all decays of a chunk to its middle, as for flat gates: with steep gates powers of two overflow."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST, ALTERED = "any_lane(find_middle(", "false && any_lane(find_middle("

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "prepare", "gradients"))
