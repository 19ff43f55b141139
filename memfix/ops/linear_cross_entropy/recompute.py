"""Cross entropy of a linear classifier in which nothing of size ``[N, V]`` ever exists, in pure torch.

Tokens are visited ``rows_per_chunk`` at a time. One buffer holds a chunk's logits and then, in their
place, their gradient, which is used at once for both matrix products. So for ``mean`` and ``sum`` the
gradient is finished in the forward and backward only scales it. For ``none`` the upstream gradient
differs by token and must be folded in before the sum over tokens: backward visits the chunks again.
"""

# N tokens, D width, V vocabulary, C tokens of a chunk, R tokens of a tile of a chunk

from __future__ import annotations

from typing import Any

import torch

from ..derivatives import first_derivative_only
from .arguments import require_linear_cross_entropy

# the softmax of 16-bit logits runs in float32, a quarter of the chunk at a time:
# the float32 tile is then half the 16-bit chunk
TILES_PER_CHUNK = 4


def recompute_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    rows_per_chunk: int = 4096,
) -> torch.Tensor:
    r"""Equals ``F.cross_entropy(hidden_ND @ weight_VD.T, target_N)``.

    Peak above inputs in a 16-bit train step, ``C = rows_per_chunk`` and ``e`` the item size:
    ``N*D*e + 4*V*D + C*V*e + max(V*D*e, C*V)`` bytes, plus one number per token.
    The gradient of the weight is summed over chunks in float32; backward may be run again.
    """
    require_linear_cross_entropy(hidden_ND, weight_VD, target_N, reduction, rows_per_chunk)
    options = (ignore_index, min(rows_per_chunk, hidden_ND.shape[0]))
    if reduction == "none":
        return _PerToken.apply(hidden_ND, weight_VD, target_N, *options)
    # inside a Function grad mode is off and requires_grad does not tell: look here
    grad_on = torch.is_grad_enabled()
    wanted = (grad_on and hidden_ND.requires_grad, grad_on and weight_VD.requires_grad)
    return _Reduced.apply(hidden_ND, weight_VD, target_N, *options, reduction == "mean", wanted)


class _Reduced(torch.autograd.Function):
    """Mean or sum: the gradient is taken in the forward, up to the upstream factor."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        ignore_index: int,
        rows_per_chunk: int,
        mean: bool,
        wanted: tuple[bool, bool],
    ) -> torch.Tensor:
        loss_N, grad_hidden_ND, sum_weight_VD = _visit_chunks(
            hidden_ND, weight_VD, target_N, None, ignore_index, rows_per_chunk, wanted
        )
        num_targets = (target_N != ignore_index).sum() if mean else None
        ctx.save_for_backward(grad_hidden_ND, sum_weight_VD, num_targets)
        ctx.weight_dtype = weight_VD.dtype
        total = loss_N.sum()
        return (total / num_targets if num_targets is not None else total).to(hidden_ND.dtype)

    @staticmethod
    @first_derivative_only("linear_cross_entropy")
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_ND, sum_weight_VD, num_targets = ctx.saved_tensors
        scale = upstream.to(torch.promote_types(upstream.dtype, torch.float32))
        if num_targets is not None:
            # with every target ignored the loss is 0/0 but its gradient is 0, as naive's is
            scale = scale / num_targets.clamp(min=1)
        # a new tensor each, not in place: a second backward must find the same gradient here
        grad_hidden = None if grad_hidden_ND is None else _scaled(grad_hidden_ND, scale, grad_hidden_ND.dtype)
        grad_weight = None if sum_weight_VD is None else _scaled(sum_weight_VD, scale, ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


class _PerToken(torch.autograd.Function):
    """No reduction: losses now, and the chunks once more in backward, weighted by the upstream gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        ignore_index: int,
        rows_per_chunk: int,
    ) -> torch.Tensor:
        loss_N, _, _ = _visit_chunks(hidden_ND, weight_VD, target_N, None, ignore_index, rows_per_chunk, (False, False))
        ctx.save_for_backward(hidden_ND, weight_VD, target_N)
        ctx.ignore_index, ctx.rows_per_chunk = ignore_index, rows_per_chunk
        return loss_N.to(hidden_ND.dtype)

    @staticmethod
    @first_derivative_only("linear_cross_entropy")
    def backward(ctx: Any, upstream_N: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, target_N = ctx.saved_tensors
        _, grad_hidden_ND, sum_weight_VD = _visit_chunks(
            hidden_ND, weight_VD, target_N, upstream_N, ctx.ignore_index, ctx.rows_per_chunk, ctx.needs_input_grad[:2]
        )
        grad_weight = None if sum_weight_VD is None else sum_weight_VD.to(weight_VD.dtype)
        return grad_hidden_ND, grad_weight, None, None, None


def _visit_chunks(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    upstream_N: torch.Tensor | None,
    ignore_index: int,
    rows_per_chunk: int,
    wanted: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Loss of every token, and where wanted the gradients of hidden (its dtype) and weight (float32 or wider)."""
    wants_hidden, wants_weight = wanted
    num_tokens, vocabulary = hidden_ND.shape[0], weight_VD.shape[0]
    sum_dtype = torch.promote_types(hidden_ND.dtype, torch.float32)
    loss_N = hidden_ND.new_empty(num_tokens, dtype=sum_dtype)
    grad_hidden_ND = hidden_ND.new_empty(hidden_ND.shape) if wants_hidden else None
    sum_weight_VD = weight_VD.new_zeros(weight_VD.shape, dtype=sum_dtype) if wants_weight else None
    buffer_CV = hidden_ND.new_empty(rows_per_chunk, vocabulary)

    for start in range(0, num_tokens, rows_per_chunk):
        chunk = slice(start, min(start + rows_per_chunk, num_tokens))
        hidden_CD = hidden_ND[chunk]
        logits_CV = torch.mm(hidden_CD, weight_VD.T, out=buffer_CV[: hidden_CD.shape[0]])
        upstream_C = None if upstream_N is None else upstream_N[chunk]
        _loss_then_gradient_in_place(
            logits_CV, target_N[chunk], upstream_C, ignore_index, loss_N[chunk], wants_hidden or wants_weight
        )
        if grad_hidden_ND is not None:
            torch.mm(logits_CV, weight_VD, out=grad_hidden_ND[chunk])
        if sum_weight_VD is not None:
            if sum_dtype == hidden_ND.dtype:
                sum_weight_VD.addmm_(logits_CV.T, hidden_CD)
            else:
                sum_weight_VD += logits_CV.T @ hidden_CD
    return loss_N, grad_hidden_ND, sum_weight_VD


def _loss_then_gradient_in_place(
    logits_CV: torch.Tensor,
    target_C: torch.Tensor,
    upstream_C: torch.Tensor | None,
    ignore_index: int,
    loss_C: torch.Tensor,
    wants_gradient: bool,
) -> None:
    """Write the tokens' losses, and their gradient over the logits themselves."""
    rows_per_tile = -(-logits_CV.shape[0] // TILES_PER_CHUNK)
    for start in range(0, logits_CV.shape[0], rows_per_tile):
        tile = slice(start, start + rows_per_tile)
        upstream_R = None if upstream_C is None else upstream_C[tile]
        _visit_tile(logits_CV[tile], target_C[tile], upstream_R, ignore_index, loss_C[tile], wants_gradient)


def _visit_tile(
    logits_RV: torch.Tensor,
    target_R: torch.Tensor,
    upstream_R: torch.Tensor | None,
    ignore_index: int,
    loss_R: torch.Tensor,
    wants_gradient: bool,
) -> None:
    """A function of its own so that one tile's float32 values are freed before the next tile's are made."""
    kept_R1 = (target_R != ignore_index).unsqueeze(1)
    # an ignored target may be out of range: look up column 0 instead and drop what is found
    column_R1 = target_R.unsqueeze(1).where(kept_R1, 0)
    values_RV = logits_RV.to(loss_R.dtype)  # no copy where the logits are that wide already
    target_logit_R1 = values_RV.gather(1, column_R1)
    max_R1 = values_RV.amax(1, keepdim=True)
    values_RV.sub_(max_R1).exp_()
    sum_R1 = values_RV.sum(1, keepdim=True)
    loss_R.copy_((sum_R1.log() + max_R1 - target_logit_R1).where(kept_R1, 0).squeeze(1))
    if not wants_gradient:
        return
    # softmax - onehot, times the weight of the token: the division by the sum is part of that one last pass
    weight_R1 = kept_R1 / sum_R1
    if upstream_R is not None:
        weight_R1 *= upstream_R.unsqueeze(1)
    values_RV.scatter_add_(1, column_R1, -sum_R1)
    torch.mul(values_RV, weight_R1, out=logits_RV)


def _scaled(tensor: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``tensor * scale`` rounded once to ``dtype``, without a wide temporary."""
    # one element rather than none of the dimensions: a 0-d scale would first be rounded to the tensor's dtype
    return torch.mul(tensor, scale.reshape(1), out=torch.empty_like(tensor, dtype=dtype))
