"""KDA one token at a time, for generation: the state in, the output and the next state out."""

# B batch, H heads, K width of a key, V width of a value

from __future__ import annotations

import torch

from ..arguments import require_same, require_shape
from ..derivatives import without_autocast
from .arguments import KdaTensors, require_state, scale_of, wide_dtype
from .sequential import step


def decode_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    *,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one token of ``kda``, and return its output ``[B, H, V]`` and a new state.

    ``q``, ``k`` and ``g`` are ``[B, H, K]``, ``v`` is ``[B, H, V]``, ``beta`` is ``[B, H]``, and ``state`` is
    ``[B, H, K, V]`` in float32 or wider. Called token after token, this gives what ``kda`` gives for the whole
    sequence. Peak above inputs without gradients: three states, or two where ``state`` is contiguous.
    """
    for name, tensor, axes in (("q", q, "B H K"), ("k", k, "B H K"), ("v", v, "B H V"), ("g", g, "B H K")):
        require_shape(name, tensor, axes)
    require_shape("beta", beta, "B H")
    require_state("state", state, (*q.shape, v.shape[-1]), q.dtype)
    require_same("device", q=q.device, state=state.device)
    token = (q.unsqueeze(1), k.unsqueeze(1), v.unsqueeze(1), g.unsqueeze(1), beta.unsqueeze(1))
    KdaTensors.checked(*token, state)
    wide = wide_dtype(q.dtype)
    parts = (q.to(wide), k.to(wide), v.to(wide), g.to(wide), beta.to(wide))
    with without_autocast(q):
        o_BHV, state_BHKV = step(*parts, state, scale_of(q, scale))
    return o_BHV.to(q.dtype), state_BHKV
