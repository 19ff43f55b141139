"""The reference: attention with the weights of all keys for all queries in one matrix."""

# B batch, G key-value heads, R query heads of each, Q queries, K keys, D width of a head, V width of a value

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F


def naive_attention(
    q_BGRQD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKV: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    keep_map: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return ``softmax(q @ k.mT * scale + bias) @ v``, without the keys that ``mask`` or ``causal`` hides.

    A query that sees no key gets zeros and gives no gradient: the softmax of its scores would be NaN, and so would the
    gradient of every value. With ``keep_map`` it returns the weights too, before dropout and without a graph.
    """
    scale = q_BGRQD.shape[-1] ** -0.5 if scale is None else scale
    scores_BGRQK = q_BGRQD @ k_BGKD.unsqueeze(2).mT * scale
    if bias is not None:
        scores_BGRQK = scores_BGRQK + bias
    hidden = _hidden(scores_BGRQK, mask, bias, causal)
    if hidden is not None:
        scores_BGRQK = scores_BGRQK.masked_fill(hidden, -torch.inf)
    weights_BGRQK = scores_BGRQK.softmax(-1)
    if hidden is not None:
        weights_BGRQK = weights_BGRQK.masked_fill(hidden.all(-1, keepdim=True), 0)
    out_BGRQV = F.dropout(weights_BGRQK, dropout) @ v_BGKV.unsqueeze(2)
    return (out_BGRQV, weights_BGRQK.detach()) if keep_map else out_BGRQV


def _hidden(
    scores: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None, causal: bool
) -> torch.Tensor | None:
    """Return a mask of the keys that a query does not see, or None where every query sees all keys."""
    hidden = []
    if mask is not None:
        hidden.append(~mask)
    if bias is not None:
        hidden.append(bias.detach() == -torch.inf)
    if causal:
        hidden.append(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1))
    return functools.reduce(torch.logical_or, hidden) if hidden else None
