"""The fix as the incident report shipped it: a loop over 4096-token chunks under plain autograd.

It is kept to be shown failing. Without gradients it is small. In training, autograd holds every
chunk's log-probabilities until backward, so one full ``[N, V]`` tensor is alive after all.
"""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch
import torch.nn.functional as F

from .arguments import require_linear_cross_entropy


def reported_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    rows_per_chunk: int = 4096,
) -> torch.Tensor:
    """Equals ``F.cross_entropy(hidden @ weight.T, target)``; holds ``N*V*e`` bytes for backward."""
    require_linear_cross_entropy(hidden_ND, weight_VD, target_N, reduction, rows_per_chunk)
    if reduction == "none":
        return torch.cat(
            [
                F.cross_entropy(hidden_CD @ weight_VD.T, target_C, ignore_index=ignore_index, reduction="none")
                for hidden_CD, target_C in zip(
                    hidden_ND.split(rows_per_chunk), target_N.split(rows_per_chunk), strict=True
                )
            ]
        )
    total = hidden_ND.new_zeros((), dtype=torch.promote_types(hidden_ND.dtype, torch.float32))
    for start in range(0, hidden_ND.shape[0], rows_per_chunk):
        logits_CV = hidden_ND[start : start + rows_per_chunk] @ weight_VD.T
        target_C = target_N[start : start + rows_per_chunk]
        total = total + F.cross_entropy(logits_CV, target_C, ignore_index=ignore_index, reduction="sum")
    if reduction == "mean":
        total = total / (target_N != ignore_index).sum()
    return total.to(hidden_ND.dtype)
