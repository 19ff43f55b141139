"""Kimi delta attention: a linear attention whose state decays by channel and overwrites what a key stored before.

Per head, with a state ``S`` of ``[K, V]``, a log-decay ``g`` of ``[K]`` and a strength ``beta``, token by token::

    S' = Diag(exp(g)) S;    S = S' + beta k (v - S'^T k)^T;    o = scale * S^T q

Where these equations leave a choice:

- ``beta`` may be any number; nothing is clamped. Between 0 and 1 a key's value is overwritten in part; up to 2 the
  transition may have negative eigenvalues, which models use too.
- ``g`` above 0 lets the state grow, and results are right while nothing overflows. Minus infinity is a reset: the
  state before that token is forgotten, with finite gradients.
- NaN in ``g`` makes all outputs of its head from that token on NaN, and the final state, but no earlier output. Then
  gradients are NaN at least in that token's chunk and, except for those of ``q``, in the chunks before it.
- Initial and final states are float32, or float64 for float64 inputs.
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

    Returns the outputs ``[B, T, H, V]`` and the final state of every sequence, ``[S, H, K, V]``. Both are
    differentiable; each gradient has the dtype of its input. ``g`` and ``beta`` may have another floating dtype than
    the rest. ``initial_state`` is ``[S, H, K, V]`` in float32, or float64 for float64 inputs; zeros unless given.
    ``cu_seqlens`` (``[S + 1]``, from 0 to T) packs S sequences along T of a batch of 1; an empty sequence keeps its
    state. ``scale`` is ``K**-0.5`` unless given. ``chunk_size`` tokens are computed together: a smaller chunk takes
    less memory and more steps.

    ``form``: ``auto`` is ``cuda`` on a GPU where Triton is installed and inputs are not float64, else ``wy``. ``cuda``
    has kernels of its own in bfloat16 with keys 64 or 128 wide on Hopper and data-center Blackwell, and is ``triton``
    elsewhere.
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
    """Call ``kda`` on S packed sequences; the i-th has the tokens ``cu_seqlens[i]`` up to ``cu_seqlens[i + 1]``."""
    return kda(q, k, v, g, beta, cu_seqlens=cu_seqlens, **options)
