"""Keeps the order of the whole epoch: 8 bytes for each example of the corpus, however few are in a batch."""

from __future__ import annotations

import functools

import torch

from memfix.ops.batches.streaming import streaming_batches

OP, LIKE, CAUGHT_BY = "batches", "streaming", "scaling"


@functools.wraps(streaming_batches)
def form(corpus, *, length, **options):
    order = torch.arange(len(corpus) // length)
    for batch in streaming_batches(corpus, length=length, **options):
        order.add_(0)
        yield batch
