"""Cross entropy of logits without a one-hot matrix. For a lookup without one see :mod:`memfix.ops.embedding`."""

from __future__ import annotations

import torch

from ..arguments import require_leading_dims
from ..dispatch import Dispatcher
from ..products import as_rows

DISPATCHER = Dispatcher("one_hot_loss", __name__, forms=("gather", "index"), otherwise="index")
FORMS = DISPATCHER.names


def one_hot_loss(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``-(F.one_hot(target, V) * F.log_softmax(logits, -1)).sum(-1)``, reduced over the targets that count.

    ``logits`` is ``[..., V]`` and ``target`` is ``[...]``. If the logits are a matrix product, use
    :func:`memfix.ops.linear_cross_entropy.linear_cross_entropy`, which never makes all of them.
    """
    require_leading_dims("target", target, of="logits", whole=logits)
    compute = DISPATCHER.function(form, logits)
    logits_NV = as_rows(logits)
    loss: torch.Tensor = compute(logits_NV, target.reshape(-1), ignore_index=ignore_index, reduction=reduction)
    return loss.reshape(target.shape) if reduction == "none" else loss
