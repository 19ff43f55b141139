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

import torch

from ..arguments import require_one_of, require_shape
from ..availability import triton_is_there
from .arguments import DEFAULT_CHUNK_SIZE
from .decode import decode_kda
from .sequential import sequential_kda
from .streamed import streamed_kda
from .wy import wy_kda

__all__ = ["FORMS", "decode_kda", "kda"]

FORMS = ("auto", "sequential", "streamed", "wy", "triton")


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend with ``q``, ``k`` and ``g`` (``[B, T, H, K]``), ``v`` (``[B, T, H, V]``) and ``beta`` (``[B, T, H]``).

    Gives the outputs ``[B, T, H, V]`` and the final state of every sequence, ``[S, H, K, V]``; gradients flow in
    through both and come back in the dtype of each input. ``g`` and ``beta`` may have another floating dtype than
    the rest. ``initial_state`` is ``[S, H, K, V]`` in float32, or float64 for float64 inputs; zeros unless given.
    ``cu_seqlens`` (``[S + 1]``, from 0 to T) packs S sequences along T of one batch; an empty one keeps its state.
    ``scale`` is ``K**-0.5`` unless given. Of ``chunk_size`` tokens, visited together, fewer take less memory and more
    steps.

    ``form``: ``auto`` is Triton's kernels on a GPU where Triton is installed and inputs are not float64, else ``wy``.
    """
    require_one_of("form", form, FORMS)
    require_shape("q", q, "B T H K")
    if form == "auto":
        form = "triton" if _suits_kernels(q) else "wy"
    tensors = (q, k, v, g, beta, initial_state, cu_seqlens)
    if form == "sequential":
        return sequential_kda(*tensors, scale=scale)
    if form == "streamed":
        return streamed_kda(*tensors, scale=scale, chunk_size=chunk_size)
    if form == "wy":
        return wy_kda(*tensors, scale=scale, chunk_size=chunk_size)
    from .triton import triton_kda

    return triton_kda(*tensors, scale=scale, chunk_size=chunk_size)


def _suits_kernels(q_BTHK: torch.Tensor) -> bool:
    return q_BTHK.is_cuda and q_BTHK.dtype != torch.float64 and triton_is_there()
