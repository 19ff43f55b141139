"""Rounds the logits to 16 bits before the softmax, as naive does: the error is large for trained models only."""

from __future__ import annotations

import functools

import torch

from memfix.ops.linear_cross_entropy import recompute
from memfix.ops.linear_cross_entropy.chunks import ChunkStrategy, chunked_linear_cross_entropy
from memfix.ops.linear_cross_entropy.options import LossTensors, Options

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


class _RoundingPass(recompute.TiledPass):
    def _logits(self, hidden_RD: torch.Tensor, values_RV: torch.Tensor, slope_RV: torch.Tensor | None) -> None:
        super()._logits(hidden_RD, values_RV, slope_RV)
        values_RV.copy_(values_RV.to(hidden_RD.dtype))


@functools.wraps(recompute.recompute_linear_cross_entropy)
def form(*tensors, **options):
    return chunked_linear_cross_entropy(LossTensors(*tensors), Options(**options), ChunkStrategy(_RoundingPass))
