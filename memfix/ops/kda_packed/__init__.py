"""KDA over sequences packed along one axis: ``kda`` with ``cu_seqlens``, held to a contract of its own."""

from __future__ import annotations

from typing import Any

import torch

from ..kda import kda


def kda_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``kda`` of S sequences, the i-th of them the tokens from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``."""
    return kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
