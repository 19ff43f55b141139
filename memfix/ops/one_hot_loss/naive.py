"""The reference: the loss of a small framework without indexing, a product of one-hot rows and log-probabilities."""

# N tokens, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_one_hot_loss(
    logits_NV: torch.Tensor, target_N: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """``-(one_hot(target) * log_softmax(logits)).sum(1)``, reduced over the tokens whose target is not ignored.

    It makes four ``N*V`` tensors: the one-hot matrix in int64 and in the working dtype, log-probabilities, product.
    """
    is_counted_N = target_N != ignore_index
    one_hot_NV = F.one_hot(target_N.where(is_counted_N, 0), logits_NV.shape[1]).to(logits_NV.dtype)
    loss_N = -(one_hot_NV * F.log_softmax(logits_NV, 1)).sum(1).where(is_counted_N, 0)
    if reduction == "none":
        return loss_N
    return loss_N.sum() / is_counted_N.sum() if reduction == "mean" else loss_N.sum()
