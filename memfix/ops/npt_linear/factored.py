"""The layer by low-rank products: no token's weight is made, forward or backward.

The low-rank term is written first, and the GEMM with the weight accumulates into it: the GEMM reads its addend while it
computes, which costs 2 % of its time, whereas adding the low-rank term to the GEMM's result is another pass over it.
"""

# N tokens, D width, F width of the result, R rank

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..derivatives import first_derivative_only
from ..products import as_rows, is_column_major, product_into, weight_gradient, wide_product
from .arguments import NptTensors


class RankTensors(NamedTuple):
    """The tensors of rank R that backward makes, in the working dtype."""

    scaled_NR: torch.Tensor
    """``down * modulation``, which forward does not save."""
    grad_down_NR: torch.Tensor
    grad_modulation_NR: torch.Tensor


@dataclass(frozen=True)
class LowRank:
    """The functions that compute the low-rank products and the elementwise products with them."""

    project_down: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    """``project_down(hidden, a, modulation)``: ``hidden @ a`` in float32 or wider, and that times the modulation,
    rounded."""
    project_back: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], RankTensors]
    """``project_back(upstream, b.T, modulation, hidden @ a)`` returns the tensors of ``RankTensors``."""
    project_up: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]
    """``project_up(out, scaled_NR, narrow_RC)`` writes ``scaled_NR @ narrow_RC`` into ``out``."""


def factored_npt_linear(
    hidden: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, modulation: torch.Tensor
) -> torch.Tensor:
    """Equals ``hidden @ weight + ((hidden @ a) * modulation) @ b``.

    The first product accumulates into the second one, so that the result is the only ``[N, F]`` tensor. Low-rank
    products are float32 for 16-bit inputs: ``hidden @ a`` may exceed float16's 65,504 before a small modulation.

    Peak above inputs, ``e`` the item size and ``w`` that of float32 or wider: ``N*F*e + N*R*(2*w + e)`` forward; in a
    train step also the wanted gradients. ``N*R*w`` is held beside the result, whatever F is.
    """
    return apply_factored(TORCH, NptTensors(hidden, weight, a, b, modulation).checked())


def apply_factored(low_rank: LowRank, tensors: NptTensors) -> torch.Tensor:
    result: torch.Tensor = _Factored.apply(low_rank, *tensors)
    return result


class _Factored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, low_rank: LowRank, *given: torch.Tensor) -> torch.Tensor:
        hidden, weight_DF, a_DR, b_RF, modulation = given
        hidden_ND = as_rows(hidden)
        down_NR, scaled_NR = low_rank.project_down(hidden_ND, a_DR, as_rows(modulation))
        result_NF = hidden.new_empty(hidden_ND.shape[0], weight_DF.shape[1])
        low_rank.project_up(result_NF, scaled_NR, b_RF)
        product_into(result_NF, hidden_ND, weight_DF, add=True)
        _, for_hidden, for_weight, for_a, for_b, for_modulation = ctx.needs_input_grad
        needs_back_product = for_hidden or for_a or for_modulation
        ctx.save_for_backward(
            hidden if for_weight or for_a else None,
            weight_DF if for_hidden else None,
            a_DR if for_hidden else None,
            b_RF if needs_back_product else None,
            *((modulation, down_NR) if needs_back_product or for_b else (None, None)),
        )
        ctx.low_rank, ctx.needs_back_product, ctx.leading_dims = low_rank, needs_back_product, hidden.shape[:-1]
        ctx.are_column_major = [is_column_major(tensor) for tensor in (weight_DF, a_DR, b_RF)]
        return result_NF.view(*ctx.leading_dims, -1)

    @staticmethod
    @first_derivative_only("npt_linear")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):  # backward uses the dtypes of forward
            return None, *_gradients(ctx, upstream)


def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients. With ``u = h A`` and ``q = G B^T``: ``dh = G W^T + (q*m) A^T``, ``dW = h^T G``,
    ``dA = h^T (q*m)``, ``dB = (u*m)^T G`` and ``dm = q*u``."""
    hidden, weight_DF, a_DR, b_RF, modulation, down_NR = ctx.saved_tensors
    _, for_hidden, for_weight, for_a, for_b, for_modulation = ctx.needs_input_grad
    is_weight_column_major, is_a_column_major, is_b_column_major = ctx.are_column_major
    upstream_NF = as_rows(upstream)
    grad_hidden = grad_weight_DF = grad_a_DR = grad_b_RF = grad_modulation = None
    if ctx.needs_back_product:
        scaled_NR, grad_down_NR, grad_modulation_NR = ctx.low_rank.project_back(
            upstream_NF, b_RF.T, as_rows(modulation), down_NR
        )
    elif for_b:
        scaled_NR = _product_in(upstream.dtype, down_NR, as_rows(modulation))
    if for_b:
        grad_b_RF = weight_gradient(scaled_NR, upstream_NF, is_b_column_major)
    if for_a:
        grad_a_DR = weight_gradient(as_rows(hidden), grad_down_NR, is_a_column_major)
    if for_hidden:
        grad_hidden_ND = upstream.new_empty(upstream_NF.shape[0], a_DR.shape[0])
        ctx.low_rank.project_up(grad_hidden_ND, grad_down_NR, a_DR.T)
        product_into(grad_hidden_ND, upstream_NF, weight_DF.T, add=True)
        grad_hidden = grad_hidden_ND.view(*ctx.leading_dims, -1)
    if for_weight:
        grad_weight_DF = weight_gradient(as_rows(hidden), upstream_NF, is_weight_column_major)
    if for_modulation:
        grad_modulation = grad_modulation_NR.view(*ctx.leading_dims, -1)
    return grad_hidden, grad_weight_DF, grad_a_DR, grad_b_RF, grad_modulation


def _project_down(
    hidden_ND: torch.Tensor, a_DR: torch.Tensor, modulation_NR: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    down_NR = wide_product(hidden_ND, a_DR)
    return down_NR, _product_in(hidden_ND.dtype, down_NR, modulation_NR)


def _project_back(
    upstream_NF: torch.Tensor, b_FR: torch.Tensor, modulation_NR: torch.Tensor, down_NR: torch.Tensor
) -> RankTensors:
    back_NR, dtype = wide_product(upstream_NF, b_FR), upstream_NF.dtype
    return RankTensors(
        _product_in(dtype, down_NR, modulation_NR),
        _product_in(dtype, back_NR, modulation_NR),
        _product_in(dtype, back_NR, down_NR),
    )


def _product_in(dtype: torch.dtype, left_NR: torch.Tensor, right_NR: torch.Tensor) -> torch.Tensor:
    """Return ``left * right`` elementwise, rounded once to ``dtype``."""
    return torch.mul(left_NR, right_NR, out=left_NR.new_empty(left_NR.shape, dtype=dtype))


TORCH = LowRank(_project_down, _project_back, product_into)
