"""The layer under ``torch.utils.checkpoint``: only the input is saved, and backward recomputes the rest."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .arguments import FeedForwardTensors, Options, plain_form


@plain_form
def checkpoint_geglu_feed_forward(tensors: FeedForwardTensors, options: Options) -> torch.Tensor:
    """Equals ``F.linear(value * F.gelu(gate), down_weight)``, where ``value, gate = F.linear(hidden, up_weight)`` in
    halves.

    Little is held between forward and backward, but backward's peak is that of a layer without a checkpoint.
    """
    tensors.require_rows_for(options.activation)
    # the layer draws no random numbers, so that the RNG state need not be saved
    result: torch.Tensor = checkpoint(_layer, tensors, options, use_reentrant=False, preserve_rng_state=False)
    return result


def _layer(tensors: FeedForwardTensors, options: Options) -> torch.Tensor:
    normed = tensors.hidden
    if tensors.has_norm:
        normed = F.layer_norm(normed, normed.shape[-1:], tensors.norm_weight, tensors.norm_bias, options.norm_eps)
    product = F.linear(normed, tensors.up_weight, tensors.up_bias)
    if options.activation == "gelu":
        activated = F.gelu(product)
    else:
        value, gate = product.chunk(2, -1)
        activated = value * (F.gelu(gate) if options.activation == "geglu" else F.silu(gate))
    result = F.linear(activated, tensors.down_weight, tensors.down_bias)
    return tensors.hidden + result if options.residual else result
