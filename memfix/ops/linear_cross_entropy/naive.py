"""The reference: cross entropy of the full logits, and their log-softmax at given tokens."""

# N tokens, ... leading dims, D width, V vocabulary

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
    logsumexp of every token that counts, reduced like the loss; but its mean divides by the number of these tokens.
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
        is_counted_N = target_N != ignore_index
        square_N = logits_NV.logsumexp(1).square().where(is_counted_N, 0)
        if reduction == "mean":
            loss = loss + z_loss * square_N.sum() / is_counted_N.sum()
        else:
            loss = loss + z_loss * (square_N.sum() if reduction == "sum" else square_N)
    return loss


def naive_token_log_probabilities(
    hidden: torch.Tensor,
    weight_VD: torch.Tensor,
    token: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
) -> torch.Tensor:
    """``log_softmax(hidden @ weight.T + bias, -1)`` at ``token``, in float32 or wider; 0 where it is ``ignore_index``.

    ``softcap`` bends the logits to ``cap * tanh(logits / cap)``; then they are divided by ``temperature``.
    """
    logits = F.linear(hidden, weight_VD, bias_V)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    wide = torch.promote_types(hidden.dtype, torch.float32)
    log_p = F.log_softmax(logits.to(wide) / temperature, -1)
    is_counted = token != ignore_index
    return log_p.gather(-1, token.where(is_counted, 0).unsqueeze(-1)).squeeze(-1).where(is_counted, 0)
