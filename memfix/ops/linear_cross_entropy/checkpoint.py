"""The loop over chunks with each chunk checkpointed: its logits are dropped, and recomputed in backward.

Most code bases write this form by hand. It repeats the product of the logits, and sums the chunks' gradients of the
weight in the dtype of the weight; in return its backward may be run any number of times.
"""

# N tokens, D width, V vocabulary, C tokens of a chunk

from __future__ import annotations

from functools import partial

import torch
from torch.utils.checkpoint import checkpoint

from .full_logits import chunks_of_full_logits, full_logits_loss
from .options import LossTensors, Options, loss_form


@loss_form
def checkpoint_linear_cross_entropy(tensors: LossTensors, options: Options) -> torch.Tensor:
    """Equals ``F.cross_entropy(hidden @ weight.T + bias, target)``.

    Peak above inputs in a train step, ``C = rows_per_chunk`` and ``e`` the item size: ``3*C*V*e`` for a chunk's logits
    and two gradients of the weight. Only the losses are held between forward and backward.
    """
    # the loss draws no random numbers, so that the RNG state need not be saved
    run = partial(checkpoint, full_logits_loss, use_reentrant=False, preserve_rng_state=False)
    return chunks_of_full_logits(tensors, options, run)
