"""What is true: cross entropy of the full logits."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_linear_cross_entropy(
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
    """``F.cross_entropy(hidden @ weight.T + bias, target)``: three ``[N, V]`` tensors at the peak of a train step.

    ``softcap`` bends the logits to ``cap * tanh(logits / cap)``. ``z_loss`` adds that many times the squared
    logsumexp of every token that counts, reduced like the loss but by their number, not by their class weights.
    """
    logits_NV = F.linear(hidden_ND, weight_VD, bias_V)
    if softcap is not None:
        logits_NV = softcap * torch.tanh(logits_NV / softcap)
    loss = F.cross_entropy(
        logits_NV,
        target_N,
        weight=class_weight_V,
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
    )
    if z_loss:
        counts_N = target_N != ignore_index
        square_N = logits_NV.logsumexp(1).square().where(counts_N, 0)
        if reduction == "mean":
            loss = loss + z_loss * square_N.sum() / counts_N.sum()
        else:
            loss = loss + z_loss * (square_N.sum() if reduction == "sum" else square_N)
    return loss
