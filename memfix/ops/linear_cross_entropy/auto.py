"""The loss as users call it, with the default form and chunk size, so that the contract can set budgets for it."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch

from .options import LossTensors


def auto_linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    class_weight: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    standard_up_to: int | str | None = None,
) -> torch.Tensor:
    """Call ``linear_cross_entropy`` with ``form="auto"``, for ``hidden`` of shape ``[N, D]`` as all forms take it."""
    from . import linear_cross_entropy

    LossTensors.checked(hidden, weight, target, bias, class_weight)
    return linear_cross_entropy(
        hidden, weight, target, bias=bias, class_weight=class_weight, ignore_index=ignore_index, reduction=reduction,
        label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss, standard_up_to=standard_up_to,
    )  # fmt: skip
