"""Draws examples with replacement: some come twice in an epoch and others never."""

from __future__ import annotations

import functools
from unittest import mock

import torch

from memfix.ops.batches import streaming
from memfix.ops.batches.windows import Windows

OP, LIKE, CAUGHT_BY = "batches", "streaming", "equality"


class _WithReplacement(Windows):
    def _starts_of_block(self, epoch, block):
        starts = super()._starts_of_block(epoch, block)
        if self.seed is None:
            return starts
        generator = torch.Generator().manual_seed(abs(self.seed) % 2**32 + epoch)
        return self.length * torch.randint(len(self), starts.shape, generator=generator)


@functools.wraps(streaming.streaming_batches)
def form(corpus, **options):
    with mock.patch.object(streaming, "Windows", _WithReplacement):
        return streaming.streaming_batches(corpus, **options)
