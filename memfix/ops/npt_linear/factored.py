"""The product of low rank itself: no token's weight is made, forward or backward."""

# N tokens, D width, F width of the result, R rank

from __future__ import annotations

from typing import Any

import torch

from ..derivatives import first_derivative_only
from ..products import product_into, sum_dtype
from .arguments import NptTensors, as_rows


def factored_npt_linear(
    hidden: torch.Tensor, weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, modulation: torch.Tensor
) -> torch.Tensor:
    """Equals ``hidden @ weight + ((hidden @ a) * modulation) @ b``.

    The second product is added where the first one is, so there is one ``[N, F]`` tensor, the result. Products of rank
    R are float32 for 16-bit inputs: ``hidden @ a`` may be above 65,504 where a small modulation makes it fit.

    Peak above inputs, ``e`` the item size and ``w`` that of float32 or wider: ``N*F*e + N*R*(2*w + e)`` forward; in a
    train step also the gradients that are asked for. ``N*R*w`` is held beside the result, whatever F is.
    """
    result: torch.Tensor = _Factored.apply(*NptTensors(hidden, weight, a, b, modulation).checked())
    return result


class _Factored(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: torch.Tensor) -> torch.Tensor:
        hidden, weight_DF, a_DR, b_RF, modulation = given
        hidden_ND, modulation_NR = as_rows(hidden), as_rows(modulation)
        down_NR = _wide_product(hidden_ND, a_DR)
        result_NF = hidden_ND @ weight_DF
        product_into(result_NF, _modulated(down_NR, modulation_NR), b_RF, add=True)
        for_hidden, for_weight, for_a, for_b, for_modulation = ctx.needs_input_grad
        ctx.save_for_backward(
            hidden if for_weight or for_a else None,
            weight_DF if for_hidden else None,
            a_DR if for_hidden else None,
            b_RF if for_hidden or for_a or for_modulation else None,
            modulation if for_hidden or for_a or for_b else None,
            down_NR if for_b or for_modulation else None,
        )
        ctx.leading_dims = hidden.shape[:-1]
        ctx.in_columns = [tensor.stride(0) < tensor.stride(1) for tensor in (weight_DF, a_DR, b_RF)]
        return result_NF.view(*ctx.leading_dims, -1)

    @staticmethod
    @first_derivative_only("npt_linear")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with torch.autocast(upstream.device.type, enabled=False):  # the dtypes are those of forward
            return _gradients(ctx, upstream)


def _gradients(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """With ``u = h A`` and ``q = G B^T``: ``dh = G W^T + (q*m) A^T``, ``dW = h^T G``, ``dA = h^T (q*m)``,
    ``dB = (u*m)^T G`` and ``dm = q*u``."""
    hidden, weight_DF, a_DR, b_RF, modulation, down_NR = ctx.saved_tensors
    for_hidden, for_weight, for_a, for_b, for_modulation = ctx.needs_input_grad
    weight_in_columns, a_in_columns, b_in_columns = ctx.in_columns
    upstream_NF = as_rows(upstream)
    grad_hidden = grad_weight_DF = grad_a_DR = grad_b_RF = grad_modulation = None
    if for_hidden or for_a or for_modulation:
        back_NR = _wide_product(upstream_NF, b_RF.T)
    if for_modulation:
        grad_modulation = (back_NR * down_NR).to(upstream.dtype).view(*ctx.leading_dims, -1)
    if for_b:
        grad_b_RF = _gradient(_modulated(down_NR, as_rows(modulation)), upstream_NF, b_in_columns)
    if for_hidden or for_a:
        grad_down_NR = _modulated(back_NR, as_rows(modulation))
    if for_a:
        grad_a_DR = _gradient(as_rows(hidden), grad_down_NR, a_in_columns)
    if for_hidden:
        grad_hidden_ND = upstream_NF @ weight_DF.T
        product_into(grad_hidden_ND, grad_down_NR, a_DR.T, add=True)
        grad_hidden = grad_hidden_ND.view(*ctx.leading_dims, -1)
    if for_weight:
        grad_weight_DF = _gradient(as_rows(hidden), upstream_NF, weight_in_columns)
    return grad_hidden, grad_weight_DF, grad_a_DR, grad_b_RF, grad_modulation


def _wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    out = left.new_empty(left.shape[0], right.shape[1], dtype=sum_dtype(left.dtype))
    product_into(out, left, right)
    return out


def _modulated(product_NR: torch.Tensor, modulation_NR: torch.Tensor) -> torch.Tensor:
    """In the dtype of the modulation, as an operand of the next product."""
    return (product_NR * modulation_NR).to(modulation_NR.dtype)


def _gradient(inputs_NI: torch.Tensor, upstream_NJ: torch.Tensor, in_columns: bool) -> torch.Tensor:
    """``inputs^T upstream``, the gradient of a weight, in the order of the weight: autograd would copy another one."""
    return (upstream_NJ.T @ inputs_NI).T if in_columns else inputs_NI.T @ upstream_NJ
