"""The loop over chunks with each chunk checkpointed: its logits are dropped and made again in backward.

What most code bases write by hand. It repeats the product of the logits, and adds up the chunks' gradients of the
weight in the dtype of the weight; in return its backward may be run as often as wanted.
"""

# N tokens, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from .arguments import require_linear_cross_entropy
from .full_logits import full_logits_loss, joined
from .targets import require_targets_in_range
from .terms import Terms


def checkpoint_linear_cross_entropy(
    hidden_ND: torch.Tensor,
    weight_VD: torch.Tensor,
    target_N: torch.Tensor,
    bias_V: torch.Tensor | None = None,
    class_weight_V: torch.Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    rows_per_chunk: int = 4096,
) -> torch.Tensor:
    """Equals ``F.cross_entropy(hidden @ weight.T + bias, target)``.

    Peak above inputs in a train step, ``C = rows_per_chunk`` and ``e`` the item size: three ``C*V*e`` of a chunk's
    logits and two gradients of the weight; nothing but the losses is held between forward and backward.
    """
    terms = Terms(
        ignore_index=ignore_index,
        reduction=reduction,
        label_smoothing=label_smoothing,
        softcap=softcap,
        z_loss=z_loss,
    )
    require_linear_cross_entropy(hidden_ND, weight_VD, target_N, bias_V, class_weight_V, rows_per_chunk)
    require_targets_in_range(target_N, weight_VD.shape[0], ignore_index)
    of_a_chunk = "none" if reduction == "none" else "sum"
    parts = (
        checkpoint(
            full_logits_loss,
            *(hidden_CD, weight_VD, target_C, bias_V, class_weight_V, terms, of_a_chunk),
            use_reentrant=False,
            preserve_rng_state=False,  # nothing is drawn
        )
        for hidden_CD, target_C in zip(hidden_ND.split(rows_per_chunk), target_N.split(rows_per_chunk), strict=True)
    )
    return joined(parts, target_N, class_weight_V, terms)
