"""Aligns the causal mask at the end, like FlashAttention: the same if Q = K, else early queries may see no key."""

from __future__ import annotations

import functools

import torch

from memfix.ops.attention.query_chunks import query_chunks_attention

OP, LIKE, CAUGHT_BY = "attention", "query_chunks", "equality"


@functools.wraps(query_chunks_attention)
def form(q, k, v, mask=None, bias=None, *, causal=False, **options):
    if causal:
        num_queries, num_keys = q.shape[3], k.shape[2]
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool).tril(num_keys - num_queries)
        mask = seen if mask is None else mask & seen
    return query_chunks_attention(q, k, v, mask, bias, **options)
