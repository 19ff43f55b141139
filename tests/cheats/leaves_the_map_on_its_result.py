"""Stores the attention map for inspection, whether it is asked for or not: the graph of the result keeps it."""

from __future__ import annotations

import functools

from memfix.ops.attention.query_chunks import query_chunks_attention

OP, LIKE, CAUGHT_BY = "attention", "query_chunks", "budget"


@functools.wraps(query_chunks_attention)
def form(*tensors, keep_map=False, **options):
    out, weights = query_chunks_attention(*tensors, **options, keep_map=True)
    out.attention_map = weights
    return (out, weights) if keep_map else out
