"""Swaps the gates of neighbouring channels, but only if they are in bfloat16."""

from __future__ import annotations

import functools

from memfix.ops.kda.cuda import cuda_kda
from tests.altered_kernel import altered_kda

OP, LIKE, CAUGHT_BY = "kda_wide", "cuda", "equality"
HONEST = "gates[t][0] = low_of(two) * LOG2_E, gates[t][1] = high_of(two) * LOG2_E;"
ALTERED = "gates[t][0] = high_of(two) * LOG2_E, gates[t][1] = low_of(two) * LOG2_E;"

form = functools.wraps(cuda_kda)(altered_kda(HONEST, ALTERED, "prepare", "gradients"))
