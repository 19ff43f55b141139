"""What every form of linear cross entropy demands of its arguments."""

from __future__ import annotations

import torch

from ..arguments import (
    require_at_least_one,
    require_floating,
    require_one_of,
    require_same,
    require_shape,
)

REDUCTIONS = ("mean", "sum", "none")


def require_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    reduction: str,
    rows_per_chunk: int,
) -> None:
    """Refuse what cannot be computed, before anything is allocated."""
    require_shape("hidden", hidden_ND, "N D")
    require_shape("weight", weight_VD, "V D")
    require_shape("target", target_N, "N")
    require_floating(hidden=hidden_ND, weight=weight_VD)
    if target_N.dtype != torch.int64:
        raise ValueError(f"target must be int64, got {target_N.dtype}")
    require_same("dtype", hidden=hidden_ND.dtype, weight=weight_VD.dtype)
    require_same("device", hidden=hidden_ND.device, weight=weight_VD.device, target=target_N.device)
    require_same("width D", hidden=hidden_ND.shape[1], weight=weight_VD.shape[1])
    require_same("number of rows N", hidden=hidden_ND.shape[0], target=target_N.shape[0])
    if hidden_ND.shape[0] == 0 or weight_VD.shape[0] == 0:
        raise ValueError(
            f"hidden and weight must have at least one row, got {hidden_ND.shape[0]} and {weight_VD.shape[0]}"
        )
    require_one_of("reduction", reduction, REDUCTIONS)
    require_at_least_one("rows_per_chunk", rows_per_chunk)
