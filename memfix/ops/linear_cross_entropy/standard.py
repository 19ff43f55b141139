"""Torch's own operators on the full logits. ``form="auto"`` uses them up to the caller's ``standard_up_to`` bytes."""

# N tokens, D width, V vocabulary

from __future__ import annotations

from dataclasses import replace

import torch

from .full_logits import chunks_of_full_logits
from .options import LossTensors, Options, loss_form


@loss_form
def standard_linear_cross_entropy(tensors: LossTensors, options: Options) -> torch.Tensor:
    """``F.cross_entropy(hidden @ weight.T + bias, target)``: three ``[N, V]`` tensors at the peak of a train step."""
    return chunks_of_full_logits(tensors, replace(options, rows_per_chunk=None))
