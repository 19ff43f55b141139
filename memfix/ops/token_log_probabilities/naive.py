"""What is true: the logarithm of the softmax of all logits, looked up at the tokens."""

# ... leading dims, D width, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F


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
    counts = token != ignore_index
    return log_p.gather(-1, token.where(counts, 0).unsqueeze(-1)).squeeze(-1).where(counts, 0)
