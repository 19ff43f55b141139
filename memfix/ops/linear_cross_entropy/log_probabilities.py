"""Log-probabilities of given tokens, a chunk of logits at a time, as policy gradients and perplexity need them."""

# N tokens, D width, V vocabulary

from __future__ import annotations

from dataclasses import replace

import torch

from ..arguments import require_leading_dims
from ..dispatch import Dispatcher
from ..products import as_rows, sum_dtype
from .chunk_size import ChunkMemory, require_one_bound
from .chunks import ChunkStrategy, chunked_linear_cross_entropy
from .options import ROWS_PER_CHUNK, LossTensors, Options
from .recompute import TiledPass
from .triton import KERNELS

DISPATCHER = Dispatcher(
    "token_log_probabilities", __name__, forms=("recompute", "triton"), otherwise="recompute", kernels="triton"
)


def token_log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    rows_per_chunk: int | None = None,
    max_bytes: int | str | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``log_softmax(softcapped(hidden @ weight.T + bias) / temperature, -1)`` at ``token``, in its shape.

    ``hidden`` is ``[..., D]``, ``token`` is ``[...]`` and ``weight`` is ``[V, D]``. The result is float32, or float64
    for float64 inputs: 16 bits are too few for ratios of probabilities. Differentiable with respect to ``hidden``,
    ``weight`` and ``bias``; backward visits the chunks again and may be repeated. A token that is
    ``ignore_index`` (padding) gives 0, and no gradient. Peak above inputs: that of ``linear_cross_entropy`` with
    ``reduction="none"``. ``form``: ``auto`` is ``triton`` on a GPU that has it, else ``recompute``.
    """
    form = DISPATCHER.chosen(form, hidden)
    require_leading_dims("token", token, of="hidden", whole=hidden)
    require_one_bound(rows_per_chunk, max_bytes)
    options = Options(
        ignore_index=ignore_index,
        reduction="none",
        softcap=softcap,
        temperature=temperature,
        rows_per_chunk=ROWS_PER_CHUNK if rows_per_chunk is None else rows_per_chunk,
    )
    if max_bytes is not None:
        rows = ChunkMemory.of(form, hidden, weight, options).rows_within(max_bytes)
        options = replace(options, rows_per_chunk=rows)
    flat = (as_rows(hidden), weight, token.reshape(-1), bias)
    tensors = LossTensors.checked(*flat, target_name="token")
    strategy = KERNELS if form == "triton" else ChunkStrategy(TiledPass)
    nll_N = chunked_linear_cross_entropy(tensors, options, strategy, loss_dtype=sum_dtype(hidden.dtype))
    return -nll_N.reshape(token.shape)
