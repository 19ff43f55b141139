"""The simple fix: gather the log-probability of each target; autograd saves all log-probabilities."""

# N tokens, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F

from .arguments import reduced, require_loss_arguments


def gather_one_hot_loss(
    logits_NV: torch.Tensor, target_N: torch.Tensor, *, ignore_index: int = -100, reduction: str = "mean"
) -> torch.Tensor:
    """Equals ``-(F.one_hot(target_N, V) * F.log_softmax(logits_NV, 1)).sum(1)``, reduced.

    Peak above inputs, ``e`` the item size: ``N*V*e`` forward, and ``3*N*V*e`` in a train step: the log-probabilities,
    the gradient that ``gather`` scatters into zeros, and the gradient of the logits.
    """
    require_loss_arguments(logits_NV, target_N, ignore_index, reduction)
    is_counted_N = target_N != ignore_index
    column_N1 = target_N.where(is_counted_N, 0).unsqueeze(1)
    loss_N = -F.log_softmax(logits_NV, 1).gather(1, column_N1).squeeze(1)
    return reduced(loss_N.where(is_counted_N, 0), is_counted_N, reduction)
