"""Rows are gathered in forward and their gradients are scatter-added in backward, without a one-hot matrix."""

# N ids, V vocabulary, D width

from __future__ import annotations

from typing import Any

import torch

from ..arguments import require_floating, require_integer, require_same, require_shape
from ..derivatives import first_derivative_only
from ..products import sum_dtype


def gather_embedding(ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """Equals ``F.one_hot(ids_N, V).to(weight_VD.dtype) @ weight_VD``.

    Peak above inputs, ``e`` the item size: ``N*D*e`` forward; backward ``V*D*e`` for float32 and float64, and
    ``N*D*4 + V*D*4`` then ``V*D*(4+e)`` for 16-bit weights, whose gradient is summed in float32.
    """
    require_shape("ids", ids_N, "N")
    require_shape("weight", weight_VD, "V D")
    require_integer(ids=ids_N)
    require_floating(weight=weight_VD)
    require_same("device", ids=ids_N.device, weight=weight_VD.device)
    return _Gather.apply(ids_N, weight_VD)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_N: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(ids_N)
        ctx.vocabulary = weight_VD.shape[0]
        return weight_VD.index_select(0, ids_N)

    @staticmethod
    @first_derivative_only("embedding")
    def backward(ctx: Any, grad_ND: torch.Tensor) -> tuple[None, torch.Tensor]:
        (ids_N,) = ctx.saved_tensors
        # one id can occur N times, and would accumulate N roundings to 16 bits
        wide = sum_dtype(grad_ND.dtype)
        sum_VD = grad_ND.new_zeros(ctx.vocabulary, grad_ND.shape[1], dtype=wide)
        sum_VD.index_add_(0, ids_N, grad_ND.to(wide))
        return None, sum_VD.to(grad_ND.dtype)
