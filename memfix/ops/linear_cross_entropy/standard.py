"""Torch's own operators on the full logits: the quickest way while they are small; ``form="auto"`` takes it then."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch

from .full_logits import chunks_of_full_logits
from .terms import Terms


def standard_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    class_weight_V: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> torch.Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, target)``: three ``[N, V]`` tensors at the peak of a train step."""
    terms = Terms(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )
    return chunks_of_full_logits(hidden_ND, weight_VD, target_N, bias_V, class_weight_V, terms)
