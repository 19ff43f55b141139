"""The loss by tiles of rows. The logits are saved for backward, which writes their gradient once."""

# N tokens, V vocabulary, R rows of a tile

from __future__ import annotations

from typing import Any

import torch

from ..derivatives import first_derivative_only
from ..products import sum_dtype
from .arguments import reduced, require_loss_arguments

TILE_BYTES = 32 * 2**20
"""Bytes of a tile of log-probabilities. On a GPU the kernels of smaller tiles take longer to launch than to run."""


def index_one_hot_loss(
    logits_NV: torch.Tensor, target_N: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """Equals ``-(F.one_hot(target_N, V) * F.log_softmax(logits_NV, 1)).sum(1)``, reduced.

    Forward makes the log-probabilities of a tile of rows, gathers those of the targets and drops the tile: one number
    per token is saved, beside the logits. Backward computes the softmax in the memory of the gradient, and writes
    ``p - 1`` at the target.

    Peak above inputs: one tile of float32 forward, and the gradient, ``N*V*e``, in a train step.
    """
    require_loss_arguments(logits_NV, target_N, ignore_index, reduction)
    is_counted_N = target_N != ignore_index
    column_N = target_N.where(is_counted_N, 0)
    loss_N = _TokenLosses.apply(logits_NV, column_N)
    loss: torch.Tensor = reduced(loss_N.where(is_counted_N, 0), is_counted_N, reduction)
    return loss.to(logits_NV.dtype)


class _TokenLosses(torch.autograd.Function):
    """The loss of each token: ``-log_softmax(logits)`` at one column of each row, in float32 or wider."""

    @staticmethod
    def forward(ctx: Any, logits_NV: torch.Tensor, column_N: torch.Tensor) -> torch.Tensor:
        wide = sum_dtype(logits_NV.dtype)
        log_p_N = logits_NV.new_empty(column_N.shape, dtype=wide)
        rows = _rows_of_a_tile(logits_NV)
        buffer_RV = logits_NV.new_empty(rows, logits_NV.shape[1], dtype=wide)
        for logits_RV, column_R, log_p_R in _tiles(rows, logits_NV, column_N, log_p_N):
            tile_RV = buffer_RV[: logits_RV.shape[0]]
            torch.log_softmax(_readable(logits_RV, tile_RV), 1, out=tile_RV)
            torch.gather(tile_RV, 1, column_R.unsqueeze(1), out=log_p_R.unsqueeze(1))
        ctx.save_for_backward(logits_NV, column_N, log_p_N)
        return -log_p_N

    @staticmethod
    @first_derivative_only("one_hot_loss")
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor, None]:
        logits_NV, column_N, log_p_N = ctx.saved_tensors
        gradient_NV = torch.empty_like(logits_NV)
        # p - 1 at the target, by expm1: accurate where p is nearly 1
        at_target_N = upstream_N * log_p_N.expm1()
        # a contiguous gradient needs no temporaries, and so no tiles
        rows = logits_NV.shape[0] if gradient_NV.is_contiguous() else _rows_of_a_tile(logits_NV)
        for tile in _tiles(rows, logits_NV, column_N, gradient_NV, upstream_N, at_target_N):
            logits_RV, column_R, gradient_RV, upstream_R, at_target_R = tile
            torch.softmax(_readable(logits_RV, gradient_RV), 1, out=gradient_RV)
            gradient_RV.mul_(upstream_R.unsqueeze(1))
            gradient_RV.scatter_(1, column_R.unsqueeze(1), at_target_R.to(gradient_RV.dtype).unsqueeze(1))
        return gradient_NV, None


def _readable(logits_RV: torch.Tensor, out_RV: torch.Tensor) -> torch.Tensor:
    """Return the logits contiguous and in the dtype of ``out``, so that softmax copies none; ``out`` takes the copy."""
    is_readable = logits_RV.dtype == out_RV.dtype and logits_RV.is_contiguous()
    return logits_RV if is_readable else out_RV.copy_(logits_RV)


def _rows_of_a_tile(logits_NV: torch.Tensor) -> int:
    return min(logits_NV.shape[0], max(1, TILE_BYTES // (4 * logits_NV.shape[1])))


def _tiles(rows: int, *tensors: torch.Tensor) -> zip[tuple[torch.Tensor, ...]]:
    """Iterate over the rows of all tensors, a tile of ``rows`` at a time."""
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)
