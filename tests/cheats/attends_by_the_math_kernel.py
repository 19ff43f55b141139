"""Calls torch's function with the math backend, which makes all scores, as naive does."""

from __future__ import annotations

import functools

from memfix.ops.attention.sdpa import sdpa_attention

OP, LIKE, CAUGHT_BY = "attention", "sdpa", "scaling"


@functools.wraps(sdpa_attention)
def form(*tensors, **options):
    return sdpa_attention(*tensors, **options, backend="math")
