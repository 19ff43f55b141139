"""The reference: every tensor of the layer is made in full, and saved for backward."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def naive_geglu_feed_forward(
    hidden: torch.Tensor,
    up_weight: torch.Tensor,
    down_weight: torch.Tensor,
    up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    norm_weight: torch.Tensor | None = None,
    norm_bias: torch.Tensor | None = None,
    *,
    activation: str = "geglu",
    residual: bool = False,
    norm_eps: float = 1e-5,
) -> torch.Tensor:
    """``hidden`` is ``[..., D]``, ``up_weight`` ``[2F, D]`` (``[F, D]`` for ``gelu``), ``down_weight`` ``[D, F]``."""
    normed = hidden
    if norm_weight is not None or norm_bias is not None:
        normed = F.layer_norm(hidden, hidden.shape[-1:], norm_weight, norm_bias, norm_eps)
    product = F.linear(normed, up_weight, up_bias)
    if activation == "gelu":
        activated = F.gelu(product)
    else:
        value, gate = product.chunk(2, -1)
        activated = value * (F.gelu(gate) if activation == "geglu" else F.silu(gate))
    result = F.linear(activated, down_weight, down_bias)
    return hidden + result if residual else result
