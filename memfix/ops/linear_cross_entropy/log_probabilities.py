"""Log-probabilities of given tokens, a chunk of logits at a time: what policy gradients and perplexity need."""

# N tokens, D width, V vocabulary

from __future__ import annotations

import torch

from ..arguments import require_one_of
from ..availability import triton_is_there
from .arguments import require_leading_dims, require_linear_cross_entropy
from .chunk_size import rows_within
from .chunks import chunked_linear_cross_entropy
from .products import sum_dtype
from .recompute import TiledPass
from .terms import Terms
from .triton import KERNELS

ROWS_PER_CHUNK = 4096
FORMS = ("auto", "recompute", "triton")


def token_log_probabilities(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    token: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int = -100,
    rows_per_chunk: int | None = None,
    max_bytes: int | str | None = None,
    form: str = "auto",
) -> torch.Tensor:
    """Equals ``log_softmax(softcapped(hidden @ weight.T + bias) / temperature, -1)`` at ``token``, in its shape.

    ``hidden`` is ``[..., D]``, ``token`` is ``[...]`` and ``weight`` is ``[V, D]``. The result is float32, or float64
    for float64 inputs: ratios of probabilities need digits that 16 bits do not have. Differentiable with respect to
    ``hidden``, ``weight`` and ``bias``; backward visits the chunks again and may be run again. A token that is
    ``ignore_index`` (padding) gives 0, and no gradient. Peak above inputs: that of ``linear_cross_entropy`` with
    ``reduction="none"``. ``form``: ``auto`` is ``triton`` on a GPU that has it, else ``recompute``.
    """
    require_one_of("form", form, FORMS)
    require_leading_dims("token", hidden, token)
    terms = Terms(ignore_index=ignore_index, reduction="none", softcap=softcap, temperature=temperature)
    if form == "auto":
        form = "triton" if hidden.is_cuda and triton_is_there() else "recompute"
    if max_bytes is not None:
        if rows_per_chunk is not None:
            raise ValueError(f"give rows_per_chunk or max_bytes, not both; got {rows_per_chunk} and {max_bytes!r}")
        rows_per_chunk = rows_within(max_bytes, form, hidden.shape[-1], weight.shape[0], hidden.dtype, terms)
    rows = ROWS_PER_CHUNK if rows_per_chunk is None else rows_per_chunk
    hidden_ND, token_N = hidden.reshape(-1, hidden.shape[-1]), token.reshape(-1)
    require_linear_cross_entropy(hidden_ND, weight, token_N, bias, None, rows, target_name="token")
    how = KERNELS if form == "triton" else {"make_pass": TiledPass}
    with torch.cuda.device_of(hidden):
        surprise_N = chunked_linear_cross_entropy(
            hidden_ND, weight, token_N, bias, None, terms, rows, **how, loss_dtype=sum_dtype(hidden.dtype)
        )
    return -surprise_N.reshape(token.shape)
