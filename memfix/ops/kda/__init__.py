"""Kimi delta attention: a linear attention whose state decays by channel and unlearns what it is told anew.

Per head, with a state ``S`` of ``[K, V]``, a log-decay ``g`` of ``[K]`` and a strength ``beta``, token by token::

    S' = Diag(exp(g)) S;    S = S' + beta k (v - S'^T k)^T;    o = scale * S^T q

What was chosen where that leaves it open:

- ``beta`` may be any number. Between 0 and 1 a key is overwritten in part; up to 2 the state's eigenvalues may be
  negative, which is in use too; nothing is clamped.
- ``g`` above 0 lets the state grow, and gives what the sums say while nothing overflows. Minus infinity is a
  reset: what was before is forgotten, with finite gradients.
- NaN in ``g`` makes every output of its head from that token on NaN, the final state too, and no output before it.
  Gradients are then NaN at least for its own chunk and, but for that of ``q``, for the chunks before it.
- states are float32, or float64 for float64 inputs, in and out.
"""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import require_shape
from ..dispatch import Dispatcher
from .arguments import DEFAULT_CHUNK_SIZE, Outputs
from .decode import decode_kda

__all__ = ["FORMS", "decode_kda", "kda", "kda_packed"]

DISPATCHER = Dispatcher(
    "kda",
    __name__,
    forms=("sequential", "streamed", "wy", "triton", "cuda"),
    otherwise="wy",
    kernels="cuda",
    not_for=(torch.float64,),
)
FORMS = DISPATCHER.names


def kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    scale: float | None = None,
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    form: str = "auto",
) -> Outputs:
    """Attend with ``q``, ``k`` and ``g`` (``[B, T, H, K]``), ``v`` (``[B, T, H, V]``) and ``beta`` (``[B, T, H]``).

    Gives the outputs ``[B, T, H, V]`` and the final state of every sequence, ``[S, H, K, V]``; gradients flow in
    through both and come back in the dtype of each input. ``g`` and ``beta`` may have another floating dtype than
    the rest. ``initial_state`` is ``[S, H, K, V]`` in float32, or float64 for float64 inputs; zeros unless given.
    ``cu_seqlens`` (``[S + 1]``, from 0 to T) packs S sequences along T of one batch; an empty one keeps its state.
    ``scale`` is ``K**-0.5`` unless given. Of ``chunk_size`` tokens, visited together, fewer take less memory and more
    steps.

    ``form``: ``auto`` is ``cuda`` on a GPU where Triton is installed and inputs are not float64, else ``wy``. ``cuda``
    has kernels of its own in bfloat16 with keys 64 or 128 wide on Hopper and on data centers' Blackwell, and is
    ``triton`` elsewhere.
    """
    require_shape("q", q, "B T H K")
    outputs: Outputs = DISPATCHER.function(form, q)(
        q, k, v, g, beta, initial_state, cu_seqlens, scale=scale, chunk_size=chunk_size
    )
    return outputs


def kda_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    cu_seqlens: torch.Tensor,
    **options: Any,
) -> Outputs:
    """``kda`` of S sequences, the i-th of them the tokens from ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``."""
    return kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
