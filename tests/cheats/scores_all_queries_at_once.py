"""Takes all queries as one chunk: the scores of blocks then have two axes of tokens."""

from __future__ import annotations

import functools

from memfix.ops.nsa.triton import triton_nsa

OP, LIKE, CAUGHT_BY = "nsa", "triton", "budget"


@functools.wraps(triton_nsa)
def form(q, k, v, gates, position_embedding=None, *, queries_per_chunk, **options):
    if isinstance(queries_per_chunk, int):
        queries_per_chunk = max(queries_per_chunk, q.shape[1])
    return triton_nsa(q, k, v, gates, position_embedding, queries_per_chunk=queries_per_chunk, **options)
