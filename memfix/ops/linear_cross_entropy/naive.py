"""What is true: cross entropy of the full logits."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> torch.Tensor:
    """``F.cross_entropy(hidden @ weight.T, target)``: three ``[N, V]`` tensors at the peak of a train step."""
    logits_NV = hidden_ND @ weight_VD.T
    return F.cross_entropy(logits_NV, target_N, ignore_index=ignore_index, reduction=reduction)
