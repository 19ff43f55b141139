"""Cross entropy of a linear classifier without its logits."""

from __future__ import annotations

import torch

from ..arguments import require_one_of
from .recompute import recompute_linear_cross_entropy

FORMS = ("auto", "recompute")


def linear_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    rows_per_chunk: int = 4096,
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``F.cross_entropy((hidden @ weight.T).flatten(0, -2), target.flatten())``, with the same leading dims
    for ``hidden`` (``[..., D]``) and ``target`` (``[...]``); ``weight`` is ``[V, D]``.

    Nothing of size tokens x vocabulary is made, in forward or in backward. ``reduction="none"`` gives one
    loss per token in the shape of ``target``. With every target ignored ``mean`` is NaN and all gradients
    are zero, as in torch.
    """
    require_one_of("form", form, FORMS)
    loss = recompute_linear_cross_entropy(
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        target.reshape(-1),
        ignore_index=ignore_index,
        reduction=reduction,
        rows_per_chunk=rows_per_chunk,
    )
    return loss.reshape(target.shape) if reduction == "none" else loss
