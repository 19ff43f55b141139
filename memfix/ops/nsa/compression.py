"""Pools each block of tokens into one vector, and carries gradients back to the tokens: equation 7 of the paper."""

# B batch, T tokens, G key-value heads, D width of a head, L places of a block, M compressed blocks

from __future__ import annotations

import torch


def place_weights(
    position_embedding_LD: torch.Tensor | None, block: int, like: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return ``(1 + position_embedding) / block``: the weight of each token in its block's vector."""
    if position_embedding_LD is None:
        return like.new_full((block, like.shape[-1]), 1 / block, dtype=dtype)
    return position_embedding_LD.to(dtype).add(1).div_(block)


def compress(x_BTGD: torch.Tensor, weight_LD: torch.Tensor, stride: int, num_blocks: int) -> torch.Tensor:
    """Return the vectors of blocks, ``[B, M, G, D]``, in the dtype of the weights, in which they are summed.

    It sums place by place, each a strided slice of the tokens: overlapping blocks, copied, would outgrow the input.
    """
    batch, _, groups, width = x_BTGD.shape
    sum_BMGD = x_BTGD.new_zeros(batch, num_blocks, groups, width, dtype=weight_LD.dtype)
    if num_blocks:
        for place, weight_D in enumerate(weight_LD.unbind()):
            sum_BMGD.addcmul_(x_BTGD[:, _tokens_at(place, stride, num_blocks)], weight_D)
    return sum_BMGD


def add_gradient_of_tokens(
    sum_BTGD: torch.Tensor, grad_BMGD: torch.Tensor, weight_LD: torch.Tensor, stride: int
) -> None:
    """Add to ``sum_BTGD`` the gradient of the tokens through ``compress``."""
    for place, weight_D in enumerate(weight_LD.unbind()):
        sum_BTGD[:, _tokens_at(place, stride, grad_BMGD.shape[1])].addcmul_(grad_BMGD, weight_D)


def add_gradient_of_places(sum_LD: torch.Tensor, grad_BMGD: torch.Tensor, x_BTGD: torch.Tensor, stride: int) -> None:
    """Add to ``sum_LD`` the gradient of the position embedding: that of the weights, divided by the block size."""
    block = sum_LD.shape[0]
    for place, sum_D in enumerate(sum_LD.unbind()):
        product_BMGD = grad_BMGD * x_BTGD[:, _tokens_at(place, stride, grad_BMGD.shape[1])]
        sum_D.add_(product_BMGD.sum((0, 1, 2)), alpha=1 / block)


def _tokens_at(place: int, stride: int, num_blocks: int) -> slice:
    """Return the tokens at one place of every block."""
    return slice(place, place + (num_blocks - 1) * stride + 1, stride)
