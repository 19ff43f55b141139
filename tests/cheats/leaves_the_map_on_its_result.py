"""Attaches the attention map to its result even if it is not wanted, which keeps the map alive."""

from __future__ import annotations

import functools

from memfix.ops.attention.query_chunks import query_chunks_attention

OP, LIKE, CAUGHT_BY = "attention", "query_chunks", "budget"


@functools.wraps(query_chunks_attention)
def form(*tensors, keep_map=False, **options):
    out, weights = query_chunks_attention(*tensors, **options, keep_map=True)
    out.attention_map = weights
    return (out, weights) if keep_map else out
