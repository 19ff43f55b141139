"""Masks by the dtype's minimum instead of -inf: a query that sees no key gets the mean of all values."""

from __future__ import annotations

import functools

import torch

from memfix.ops.attention.sdpa import sdpa_attention

OP, LIKE, CAUGHT_BY = "attention", "sdpa", "equality"


@functools.wraps(sdpa_attention)
def form(q, k, v, mask=None, bias=None, **options):
    if mask is not None:
        hidden = torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)
        bias = hidden if bias is None else bias + hidden
    return sdpa_attention(q, k, v, None, bias, **options)
