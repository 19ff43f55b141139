"""The steps that both forms share: refuse bad arguments, and reduce the losses of the tokens."""

# N tokens, V vocabulary

from __future__ import annotations

import torch

from ..arguments import require_floating, require_one_of, require_same, require_shape
from ..linear_cross_entropy.options import REDUCTIONS
from ..linear_cross_entropy.targets import require_targets_in_range


def require_loss_arguments(logits_NV: torch.Tensor, target_N: torch.Tensor, ignore_index: int, reduction: str) -> None:
    """Refuse bad arguments, before anything is allocated. On a GPU a target out of range is a device-side assert, as in
    torch: a check here would make the host wait."""
    require_shape("logits", logits_NV, "N V")
    require_shape("target", target_N, "N")
    require_floating(logits=logits_NV)
    if target_N.dtype != torch.int64:
        raise ValueError(f"target must be int64, got {target_N.dtype}")
    require_same("device", logits=logits_NV.device, target=target_N.device)
    require_same("number of rows N", logits=logits_NV.shape[0], target=target_N.shape[0])
    require_one_of("reduction", reduction, REDUCTIONS)
    if 0 in logits_NV.shape:
        raise ValueError(f"logits must have at least one row and one class, got shape {list(logits_NV.shape)}")
    require_targets_in_range(target_N, logits_NV.shape[1], ignore_index)


def reduced(loss_N: torch.Tensor, is_counted_N: torch.Tensor, reduction: str) -> torch.Tensor:
    """Reduce the losses of all tokens. A mean without a token that counts is 0/0, as in torch."""
    if reduction == "none":
        return loss_N
    return loss_N.sum() / is_counted_N.sum() if reduction == "mean" else loss_N.sum()
