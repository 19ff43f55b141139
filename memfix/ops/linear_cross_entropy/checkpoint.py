"""The loop over chunks with each chunk checkpointed: its logits are dropped and made again in backward.

What most code bases write by hand. It repeats the product of the logits, and adds up the chunks' gradients of the
weight in the dtype of the weight; in return its backward may be run as often as wanted.
"""

# N tokens, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from .full_logits import chunks_of_full_logits, full_logits_loss
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
    # nothing is drawn at random, so no state of a generator need be kept
    run = partial(checkpoint, full_logits_loss, use_reentrant=False, preserve_rng_state=False)
    return chunks_of_full_logits(hidden_ND, weight_VD, target_N, bias_V, class_weight_V, terms, rows_per_chunk, run)
