"""The chunked loss in pure torch, for any device: few passes over the logits, and no logit rounded to 16 bits.

The product makes a tile of logits in float32. They become log-probabilities in place, then their gradient in the
working dtype. So the softmax reads unrounded sums: for logits in the tens, rounding them to bfloat16 would be a
larger error than all other roundings together.
"""

# D width, V vocabulary, C tokens of a chunk, R tokens of a tile of a chunk

from __future__ import annotations

from typing import NamedTuple

import torch

from ..products import product_into, sum_dtype
from .chunks import ChunkStrategy, Head, chunked_linear_cross_entropy
from .logits_gradient import DenseGradient
from .options import LossTensors, Options, loss_form
from .targets import Counted
from .terms import Coefficients, Sums

# the softmax of 16-bit logits runs in float32, a quarter of the chunk at a time:
# the float32 tile is then half the 16-bit chunk
TILES_PER_CHUNK = 4


@loss_form
def recompute_linear_cross_entropy(tensors: LossTensors, options: Options) -> torch.Tensor:
    r"""Equals ``F.cross_entropy(hidden_ND @ weight_VD.T + bias_V, target_N)``.

    Peak above inputs in a 16-bit train step, ``C = rows_per_chunk`` and ``e`` the item size:
    ``N*D*e + 4*V*D + C*V*e + C*V`` bytes, plus a few numbers per token. Without gradients the tile alone: ``C*V``.
    The gradient of the weight is summed over chunks in float32; a second backward of ``mean`` or ``sum`` is refused.
    """
    return chunked_linear_cross_entropy(tensors, options, ChunkStrategy(TiledPass))


class Tile(NamedTuple):
    """The inputs of a tile's tokens, the output for their sums, and the output for their gradient, if it is wanted."""

    hidden_RD: torch.Tensor
    target_R: torch.Tensor
    sums: Sums
    coefficients: Coefficients | None
    gradient_RV: torch.Tensor | None


class TiledPass:
    """The pass over a chunk by tiles. 16-bit dtypes need a float32 tile of logits; others use the gradient's memory."""

    keeps_slope = True
    """Whether the slope of a cap needs a buffer beside the logits."""

    def __init__(self, head: Head, rows_per_chunk: int, wants_gradient: bool) -> None:
        self.head = head
        weight_VD = head.weight_VD
        self.weight_DV = weight_VD.T
        wide = sum_dtype(weight_VD.dtype)
        caps = self.keeps_slope and head.options.softcap is not None and wants_gradient
        self.rows_per_tile = self._rows_per_tile(rows_per_chunk, caps)
        size_RV, size_CV = (self.rows_per_tile, head.vocabulary), (rows_per_chunk, head.vocabulary)
        self.gradient_CV = weight_VD.new_empty(size_CV) if wants_gradient else None
        in_place = wants_gradient and wide == weight_VD.dtype
        self.values_RV = None if in_place else weight_VD.new_empty(size_RV, dtype=wide)
        self.slope_RV = weight_VD.new_empty(size_RV, dtype=wide) if caps else None
        self.one = weight_VD.new_ones((), dtype=wide) if caps else None

    @staticmethod
    def bytes_of(rows_per_chunk: int, vocabulary: int, dtype: torch.dtype, *, caps: bool) -> int:
        """Return the bytes of a train step's buffers."""
        wide = sum_dtype(dtype)
        tile_rows = ((wide != dtype) + caps) * TiledPass._rows_per_tile(rows_per_chunk, caps)
        return vocabulary * (rows_per_chunk * dtype.itemsize + tile_rows * wide.itemsize)

    @staticmethod
    def _rows_per_tile(rows_per_chunk: int, caps: bool) -> int:
        # a cap needs a second buffer for its slope: halve the rows of a tile
        return -(-rows_per_chunk // (2 * TILES_PER_CHUNK if caps else TILES_PER_CHUNK))

    def begin(self, hidden_ND: torch.Tensor, counted: Counted, sums: Sums) -> None:
        """Do nothing: this pass needs no preparation."""

    def __call__(
        self, hidden_CD: torch.Tensor, target_C: torch.Tensor, sums: Sums, coefficients: Coefficients | None
    ) -> DenseGradient | None:
        rows = self.rows_per_tile
        gradient_CV = None if self.gradient_CV is None else first_rows(hidden_CD.shape[0], self.gradient_CV)
        hidden, target, own_sums = hidden_CD.split(rows), target_C.split(rows), sums.split(rows)
        gradient = gradient_CV.split(rows) if gradient_CV is not None else len(hidden) * [None]
        own_coefficients = coefficients.split(rows) if coefficients is not None else len(hidden) * [None]
        for tile in zip(hidden, target, own_sums, own_coefficients, gradient, strict=True):
            self._visit_tile(Tile(*tile))
        return None if gradient_CV is None else DenseGradient(gradient_CV, self.head.weight_VD)

    def _visit_tile(self, tile: Tile) -> None:
        hidden_RD, target_R, sums, coefficients, gradient_RV = tile
        num_rows = hidden_RD.shape[0]
        values_RV = self._logits_buffer(num_rows, gradient_RV)
        slope_RV = None if self.slope_RV is None else first_rows(num_rows, self.slope_RV)
        self._logits(hidden_RD, values_RV, slope_RV)
        highest_R = None if sums.logsumexp_K is None else values_RV.amax(1)
        torch.log_softmax(values_RV, 1, out=values_RV)
        column_R1 = target_R.unsqueeze(1)
        at_target_R1 = values_RV.gather(1, column_R1)
        torch.neg(at_target_R1.squeeze(1), out=sums.nll_K)
        if highest_R is not None and sums.logsumexp_K is not None:
            # lse = z - log p at the largest logit, which is finite where the loss is; the target's may be -inf
            torch.sub(highest_R, values_RV.amax(1), out=sums.logsumexp_K)
        if sums.smooth_K is not None:
            weights_V = self.head.class_weight_V
            smooth_R = values_RV.sum(1) if weights_V is None else torch.mv(values_RV, weights_V)
            torch.neg(smooth_R, out=sums.smooth_K)
        if gradient_RV is None:
            return
        if coefficients is None:
            # p - 1 at the target, by expm1: accurate where p is nearly 1
            at_target_R1 = at_target_R1.expm1()
            if slope_RV is None:
                torch.exp(values_RV, out=gradient_RV)
            else:
                torch.mul(values_RV.exp_(), slope_RV, out=gradient_RV)
        else:
            at_target_R1 = self._weigh(values_RV, at_target_R1, target_R, sums, coefficients, slope_RV, gradient_RV)
        if slope_RV is not None:
            at_target_R1 = at_target_R1 * slope_RV.gather(1, column_R1)
        gradient_RV.scatter_(1, column_R1, at_target_R1.to(gradient_RV.dtype))

    def _logits_buffer(self, num_rows: int, gradient_RV: torch.Tensor | None) -> torch.Tensor:
        values_RV = first_rows(num_rows, self.values_RV) if self.values_RV is not None else gradient_RV
        assert values_RV is not None
        return values_RV

    def _logits(self, hidden_RD: torch.Tensor, values_RV: torch.Tensor, slope_RV: torch.Tensor | None) -> None:
        """Write ``hidden @ weight.T + bias``, capped and divided by the temperature, and the slope of the cap."""
        head, cap, temperature = self.head, self.head.options.softcap, self.head.options.temperature
        product_into(values_RV, hidden_RD, self.weight_DV, alpha=1 / temperature if cap is None else 1 / cap)
        if head.bias_V is not None:
            values_RV.add_(head.bias_V, alpha=1 / temperature if cap is None else 1 / cap)
        if cap is not None:
            values_RV.tanh_()
            if slope_RV is not None and self.one is not None:
                torch.addcmul(self.one, values_RV, values_RV, value=-1, out=slope_RV)
            values_RV.mul_(cap / temperature)

    def _weigh(
        self,
        log_p_RV: torch.Tensor,
        log_p_target_R1: torch.Tensor,
        target_R: torch.Tensor,
        sums: Sums,
        coefficients: Coefficients,
        slope_RV: torch.Tensor | None,
        gradient_RV: torch.Tensor,
    ) -> torch.Tensor:
        """Write the gradient given by ``Coefficients``, except the target's column, which is returned."""
        softmax_R1, smooth_R = coefficients.softmax_K.unsqueeze(1), coefficients.smooth_K
        # a sum of small terms: the difference of two numbers near 1 would cancel most of its digits
        at_target_R1 = coefficients.target_K.unsqueeze(1) * log_p_target_R1.expm1()
        p_target_R1 = log_p_target_R1.exp()
        if coefficients.square_K is not None and sums.logsumexp_K is not None:
            square_R1 = (coefficients.square_K * sums.logsumexp_K).unsqueeze(1)
            softmax_R1 = softmax_R1 + square_R1
            at_target_R1 += square_R1 * p_target_R1
        p_RV = log_p_RV.exp_()
        if smooth_R is None and slope_RV is None:
            torch.mul(p_RV, softmax_R1, out=gradient_RV)
            return at_target_R1
        p_RV.mul_(softmax_R1)
        if smooth_R is not None:
            weights_V = self.head.class_weight_V
            smooth_R1 = smooth_R.unsqueeze(1)
            if weights_V is None:
                p_RV.sub_(smooth_R1)
                at_target_R1 += smooth_R1 * (self.head.vocabulary * p_target_R1 - 1)
            else:
                p_RV.addcmul_(smooth_R1, weights_V, value=-1)
                weight_R1 = weights_V.index_select(0, target_R).unsqueeze(1)
                at_target_R1 += smooth_R1 * (weights_V.sum() * p_target_R1 - weight_R1)
        if slope_RV is not None:
            torch.mul(p_RV, slope_RV, out=gradient_RV)
        else:
            gradient_RV.copy_(p_RV)  # does nothing if both are the same memory
        return at_target_R1


def first_rows(num_rows: int, buffer: torch.Tensor) -> torch.Tensor:
    return buffer if num_rows == buffer.shape[0] else buffer[:num_rows]
