"""Causal attention over all tokens, or over a window of the last tokens."""

# B batch, T tokens, H heads, K head width, W window, N blocks of W tokens, S keys that a block can see

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def dense_attention(
    q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor, *, dropout: float = 0.0
) -> torch.Tensor:
    """Attention by a softmax of all ``T*T`` scores, as in a small framework; the matrix is kept for backward."""
    num_tokens = q_BHTK.shape[-2]
    place_T = torch.arange(num_tokens, device=q_BHTK.device)
    return _attend(q_BHTK, k_BHTK, v_BHTK, place_T > place_T[:, None], dropout)


def window_attention(
    q_BHTK: torch.Tensor, k_BHTK: torch.Tensor, v_BHTK: torch.Tensor, *, window: int, dropout: float = 0.0
) -> torch.Tensor:
    """Attention of each token to the last ``window`` tokens, itself included: ``2*T*W`` scores in place of ``T*T``.

    Equals :func:`dense_attention` where ``window`` is at least the number of tokens. Queries are taken in blocks of
    ``window``, and each block has the keys of its own block and of the block before.
    """
    num_tokens = q_BHTK.shape[-2]
    if window >= num_tokens:
        return dense_attention(q_BHTK, k_BHTK, v_BHTK, dropout=dropout)
    missing = -num_tokens % window
    q_BHNWK = F.pad(q_BHTK, (0, 0, 0, missing)).unflatten(-2, (-1, window))
    # a padding block before the first, so that every block has a predecessor
    k_BHNSK, v_BHNSK = (
        F.pad(x_BHTK, (0, 0, window, missing)).unfold(-2, 2 * window, window).transpose(-1, -2)
        for x_BHTK in (k_BHTK, v_BHTK)
    )
    num_blocks = q_BHNWK.shape[-3]
    place_W, place_S = (torch.arange(size, device=q_BHTK.device) for size in (window, 2 * window))
    ahead_WS = place_S - window - place_W[:, None]  # by how many tokens a key comes after the query
    is_hidden_WS = (ahead_WS > 0) | (ahead_WS <= -window)
    is_before_text_NS = torch.arange(num_blocks, device=q_BHTK.device)[:, None] * window + place_S < window
    is_hidden_NWS = is_hidden_WS | is_before_text_NS[:, None]
    out_BHNWK = _attend(q_BHNWK, k_BHNSK, v_BHNSK, is_hidden_NWS, dropout)
    return out_BHNWK.flatten(-3, -2)[..., :num_tokens, :]


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_hidden: torch.Tensor, dropout: float) -> torch.Tensor:
    scores = (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)
    weights = scores.masked_fill_(is_hidden, -math.inf).softmax(-1)
    return F.dropout(weights, dropout) @ v
