"""Softmax attention without the matrix of all scores: self and cross, masked, causal, grouped, with dropout."""

from __future__ import annotations

from typing import Any

import torch

from ..arguments import require_shape, require_tensor
from ..dispatch import AUTO, Dispatcher

DISPATCHER = Dispatcher("attention", __name__, forms=("query_chunks", "sdpa"), otherwise="sdpa")
FORMS = DISPATCHER.names


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    keep_map: bool = False,
    form: str = "auto",
    queries_per_chunk: int | None = None,
    backend: str | None = None,
) -> Any:
    """Equals ``softmax(q @ k.mT * scale + bias) @ v``, without the keys that ``mask`` or ``causal`` hides.

    ``q`` is ``[B, H, Q, D]``, ``k`` is ``[B, G, K, D]`` and ``v`` is ``[B, G, K, V]``, H a multiple of G. ``mask``
    (bool, True where a query sees a key) and ``bias`` (in the dtype of q) broadcast to ``[B, H, Q, K]``. ``scale`` is
    ``D**-0.5`` unless given. ``causal``: query i sees the keys up to i. A query that sees no key gets zeros and gives
    no gradient. ``dropout`` is applied whenever it is above 0: pass 0 where the model does not train.

    The result is ``[B, H, Q, V]``. ``keep_map=True`` returns it and the weights, ``[B, H, Q, K]``, before dropout and
    without a graph: ``B*H*Q*K*e`` bytes for as long as they are kept.

    ``form="auto"`` is ``sdpa``, torch's fused kernels. ``backend`` chooses one of them;
    :func:`~memfix.ops.attention.backend_for` says which one a call takes. Where torch has none that saves memory, auto
    is ``query_chunks``: for a bias that needs a gradient or comes with a mask, in float64 on a GPU, and on a CPU with
    dropout or values of another width. There are only first derivatives.
    """
    grouped = _grouped(q, k, v, mask, bias)
    if form == AUTO:
        form = "sdpa" if backend is not None else _form_for(q, v, mask, bias, dropout)
    chosen = DISPATCHER.chosen(form)
    options: dict[str, Any] = {"causal": causal, "scale": scale, "dropout": dropout, "keep_map": keep_map}
    for name, value, its_form in (
        ("queries_per_chunk", queries_per_chunk, "query_chunks"),
        ("backend", backend, "sdpa"),
    ):
        if value is None:
            continue
        if chosen != its_form:
            raise ValueError(f"{name} is for form {its_form!r}, and the form is {chosen!r}; leave it out")
        options[name] = value
    result = DISPATCHER.function(chosen)(*grouped, **options)
    return tuple(part.flatten(1, 2) for part in result) if keep_map else result.flatten(1, 2)


def backend_for(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    causal: bool = False,
    dropout: float = 0.0,
    backend: str | None = None,
) -> str:
    """Return torch's backend that the form ``sdpa`` uses: ``"cudnn"``, ``"flash"``, ``"efficient"`` or ``"math"``.

    On a GPU this is the first of these that can run the call; cuDNN only on Hopper, where it is the fastest in 16 bits.
    float32 has only ``efficient`` and ``math``, a CPU only ``flash`` and ``math``. A ``backend`` that cannot run the
    call is refused.
    """
    from .sdpa import sdpa_backend

    name: str = sdpa_backend(*_grouped(q, k, v, mask, bias), causal=causal, dropout=dropout, backend=backend)
    return name


def _form_for(
    q: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None, dropout: float
) -> str:
    """Return ``sdpa`` where torch has a kernel that materialises neither the scores, nor their gradient, nor a mask of
    their size; else ``query_chunks``."""
    is_fused = q.dtype != torch.float64 if q.is_cuda else not dropout and q.shape[-1] == v.shape[-1]
    if bias is not None:
        is_fused = is_fused and mask is None and not (bias.requires_grad and torch.is_grad_enabled())
    return "sdpa" if is_fused else "query_chunks"


def _grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors as forms take them, with the heads of q in groups, ``[B, G, R, Q, D]``."""
    require_shape("q", q, "B H Q D")
    require_shape("k", k, "B G K D")
    require_shape("v", v, "B G K V")
    num_heads, groups = q.shape[1], k.shape[1]
    if groups == 0 or num_heads % groups:
        raise ValueError(f"the number of heads of q must be a multiple of k's, got {num_heads} and {groups}")
    masks = (_mask_in_groups(name, mask, groups, num_heads) for name, mask in (("mask", mask), ("bias", bias)))
    return q.unflatten(1, (groups, -1)), k, v, *masks


def _mask_in_groups(name: str, mask: torch.Tensor | None, groups: int, num_heads: int) -> torch.Tensor | None:
    if mask is None or require_tensor(name, mask).dim() < 3:
        return mask
    if mask.dim() > 4 or mask.shape[-3] not in (1, num_heads):
        raise ValueError(f"{name} must broadcast to [B, H, Q, K] with H = {num_heads}, got shape {list(mask.shape)}")
    return mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, (groups, -1))
