"""Chunks of tokens with the gate and its backward as one Triton kernel each; torch's operators if there is no GPU.

The costs of a train step of the incident on an H200: 65,536 tokens, D = 512, F = 2048, biases and a norm. ``u`` is the
size of one ``[N, D]`` tensor: 64 MiB in bfloat16, 128 MiB in float32. The first product is 8u, activated values are 4u.

- Memory traffic of elementwise passes: naive has 72u (gelu, product, their backward, and the concatenation of the two
  halves of the gradient) and 8u for the bias. Here the gate reads 8u and writes 4u, and its backward, which also sums
  for the bias, reads 12u and writes 12u: 36u. In bfloat16 this saves more time than the recomputation of the first
  product takes: 4.2 ms, naive 4.5 ms.
- In float32 matrix products take nine tenths of the time, and the recomputation of the first product takes 5.7 ms: 1.2
  times naive's 28 ms. With the products of 7/16 of the tokens kept it is 1.11 times.
- Bytes above the inputs, ``c`` the chunk's share of the tokens: 2u for the result and the gradient of hidden, and 14uc
  for a chunk (product 8, gradient of the activated values 4, norm 1 and its gradient 1). With chunks of 16,384 tokens
  that is 5.5u, 352 MiB in bfloat16, and 12 MiB for the gradients of the weights. Keeping 7/16 of the products adds 3.5u
  and saves the chunk's 8uc: with chunks of 8192 tokens 6.25u, 800 MiB in float32, where naive takes 26u.
"""

# F hidden width, H columns of the first product: 2F, or F without a gate; C tokens of a chunk, P parts of a sum

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..dispatch import is_interpreted, triton_is_installed
from ..launches import launch
from ..products import sum_dtype
from .arguments import ChunkOptions, FeedForwardTensors, chunked_form
from .chunks import Activation, chunked_feed_forward
from .token_chunks import IN_BLOCKS


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of the kernels: a tile is ``tokens`` by ``columns``, and a backward program visits ``steps`` tiles."""

    tokens: int = 8
    columns: int = 256
    steps: int = 8


TILES = Tiles()


@chunked_form
def fused_geglu_feed_forward(tensors: FeedForwardTensors, options: ChunkOptions) -> torch.Tensor:
    """Equals ``F.linear(value * F.gelu(gate), down_weight)``, where ``value, gate = F.linear(hidden, up_weight)`` in
    halves.

    Peak above inputs in a train step, ``e`` the item size and ``C = tokens_per_chunk``: ``2*N*D*e + 3*C*F*e``, with a
    norm ``2*C*D*e`` more, and the gradients of the weights in float32. Between forward and backward only the input, the
    result, and ``2*F*e`` bytes for each of ``tokens_kept`` tokens are held.
    """
    hidden = tensors.hidden
    runs_kernels = triton_is_installed() and (hidden.is_cuda or is_interpreted())
    return chunked_feed_forward(tensors, options, BY_KERNELS if runs_kernels else IN_BLOCKS)


def _forward(product_CH: torch.Tensor, out_CF: torch.Tensor, activation: str) -> None:
    from .kernels import activate

    num_tokens, hidden_width = out_CF.shape
    launch(
        activate, (-(-num_tokens // TILES.tokens), -(-hidden_width // TILES.columns)),
        product_CH, product_CH.stride(0), out_CF, out_CF.stride(0), num_tokens, hidden_width,
        IS_GATED=activation != "gelu", IS_SILU=activation == "swiglu", TOKENS=TILES.tokens, COLUMNS=TILES.columns,
        num_warps=4, num_stages=3,
    )  # fmt: skip


def _backward(
    product_CH: torch.Tensor, gradient_CF: torch.Tensor, activation: str, wants_sums: bool
) -> torch.Tensor | None:
    from .kernels import activate_backward

    num_tokens, hidden_width = gradient_CF.shape
    num_parts = -(-num_tokens // (TILES.tokens * TILES.steps))
    size_PH, wide = (num_parts, product_CH.shape[1]), sum_dtype(product_CH.dtype)
    parts_PH = product_CH.new_empty(size_PH, dtype=wide) if wants_sums else None
    launch(
        activate_backward, (num_parts, -(-hidden_width // TILES.columns)),
        product_CH, product_CH.stride(0), gradient_CF, gradient_CF.stride(0), parts_PH,
        num_tokens, hidden_width, product_CH.shape[1], HAS_SUMS=wants_sums,
        IS_GATED=activation != "gelu", IS_SILU=activation == "swiglu",
        TOKENS=TILES.tokens, STEPS=TILES.steps, COLUMNS=TILES.columns, num_warps=4, num_stages=3,
    )  # fmt: skip
    return None if parts_PH is None else parts_PH.sum(0)


BY_KERNELS = Activation(_forward, _backward)
