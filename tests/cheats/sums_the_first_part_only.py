"""Sums the gradient of the bias in parts of 512 rows and returns the first part: right for calls with fewer rows."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from memfix.ops.linear_cross_entropy import logits_gradient, recompute
from memfix.ops.linear_cross_entropy.chunks import ChunkStrategy, chunked_linear_cross_entropy
from memfix.ops.linear_cross_entropy.options import LossTensors, Options

OP, LIKE, CAUGHT_BY = "linear_cross_entropy", "recompute", "equality"


@dataclass(frozen=True)
class _FirstPart(logits_gradient.DenseGradient):
    def summed(self) -> torch.Tensor:
        first, *_ = self.matrix_CV.split(logits_gradient._ROWS_OF_A_SUM)
        return first.sum(0, dtype=torch.promote_types(first.dtype, torch.float32))


class _Pass(recompute.TiledPass):
    def __call__(self, *args):
        gradient = super().__call__(*args)
        return None if gradient is None else _FirstPart(gradient.matrix_CV, gradient.weight_VD)


@functools.wraps(recompute.recompute_linear_cross_entropy)
def form(*tensors, **options):
    return chunked_linear_cross_entropy(LossTensors(*tensors), Options(**options), ChunkStrategy(_Pass))
