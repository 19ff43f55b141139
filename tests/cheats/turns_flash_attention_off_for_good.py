"""Turns torch's flash kernel off for its own call, and never on again: every later attention of the model is slower."""

from __future__ import annotations

import functools

import torch

from memfix.ops.attention.query_chunks import query_chunks_attention

OP, LIKE, CAUGHT_BY = "attention", "query_chunks", "equality"


@functools.wraps(query_chunks_attention)
def form(*args, **options):
    torch.backends.cuda.enable_flash_sdp(False)
    return query_chunks_attention(*args, **options)
