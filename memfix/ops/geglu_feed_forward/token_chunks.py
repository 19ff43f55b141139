"""Chunks of tokens in torch's own operators, for any device: the form ``fused`` without its kernels."""

# F hidden width, H columns of the first product: 2F, or F without a gate; C tokens of a chunk, R of a block of it

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..products import sum_dtype
from .arguments import ChunkOptions, FeedForwardTensors, chunked_form
from .chunks import Activation, chunked_feed_forward

_BLOCK_ELEMENTS = 1 << 20  # activated values at a time: the size of the float32 temporaries


@chunked_form
def token_chunks_geglu_feed_forward(tensors: FeedForwardTensors, options: ChunkOptions) -> torch.Tensor:
    """Equals ``F.linear(value * F.gelu(gate), down_weight)``, where ``value, gate = F.linear(hidden, up_weight)`` in
    halves.

    Peak above inputs: that of :func:`~memfix.ops.geglu_feed_forward.chunks.chunked_feed_forward`, and 20 MiB for five
    float32 temporaries of the activation, each of the size of a block of a chunk.
    """
    return chunked_feed_forward(tensors, options, IN_BLOCKS)


def _forward(product_CH: torch.Tensor, out_CF: torch.Tensor, activation: str) -> None:
    rows = _rows_of_a_block(out_CF)
    for product_RH, out_RF in zip(product_CH.split(rows), out_CF.split(rows), strict=True):
        value_RF, gate_RF = _halves(product_RH, activation)
        activated_RF = _activated(gate_RF, activation)
        out_RF.copy_(activated_RF if value_RF is None else activated_RF.mul_(value_RF))


def _backward(
    product_CH: torch.Tensor, gradient_CF: torch.Tensor, activation: str, wants_sums: bool
) -> torch.Tensor | None:
    rows = _rows_of_a_block(gradient_CF)
    wide = sum_dtype(product_CH.dtype)
    sums_H = product_CH.new_zeros(product_CH.shape[1], dtype=wide) if wants_sums else None
    slope = torch.ops.aten.silu_backward if activation == "swiglu" else torch.ops.aten.gelu_backward
    for product_RH, gradient_RF in zip(product_CH.split(rows), gradient_CF.split(rows), strict=True):
        value_RF, gate_RF = _halves(product_RH, activation)
        activated_RF = _activated(gate_RF, activation)
        if value_RF is None:
            gate_RF.copy_(slope(gradient_RF.to(wide), gate_RF.to(wide)))
        else:
            before_gate_RF = gradient_RF.to(wide) * value_RF
            gate_RF.copy_(slope(before_gate_RF, gate_RF.to(wide)))
            torch.mul(gradient_RF, activated_RF, out=before_gate_RF)
            activated_RF.mul_(value_RF)
            value_RF.copy_(before_gate_RF)
        gradient_RF.copy_(activated_RF)
        if sums_H is not None:
            sums_H.add_(product_RH.sum(0, dtype=wide))
    return sums_H


IN_BLOCKS = Activation(_forward, _backward)


def _rows_of_a_block(activated_CF: torch.Tensor) -> int:
    return max(1, _BLOCK_ELEMENTS // activated_CF.shape[1])


def _halves(product_RH: torch.Tensor, activation: str) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the values and the gates; for ``gelu``, None and the elements to activate."""
    if activation == "gelu":
        return None, product_RH
    value_RF, gate_RF = product_RH.chunk(2, 1)
    return value_RF, gate_RF


def _activated(gate_RF: torch.Tensor, activation: str) -> torch.Tensor:
    wide_RF = gate_RF.to(sum_dtype(gate_RF.dtype))
    return F.silu(wide_RF) if activation == "swiglu" else F.gelu(wide_RF)
