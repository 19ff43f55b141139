"""Torch's function with the one kernel that always runs: it makes every score, as naive does."""

from __future__ import annotations

import functools

from memfix.ops.attention.sdpa import sdpa_attention

OP, LIKE, CAUGHT_BY = "attention", "sdpa", "scaling"


@functools.wraps(sdpa_attention)
def form(*tensors, **options):
    return sdpa_attention(*tensors, **options, backend="math")
