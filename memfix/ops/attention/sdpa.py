"""Attention by torch's fused kernels, on a backend that is chosen explicitly."""

# B batch, G key-value heads, R query heads of each, Q queries, K keys, D width of a head, V width of a value

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..arguments import require_one_of
from ..call import takes
from .arguments import AttentionOptions, AttentionTensors
from .backends import BACKENDS, chosen, prepared
from .query_chunk import map_of


@dataclass(frozen=True, kw_only=True)
class SdpaOptions(AttentionOptions):
    backend: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backend is not None:
            require_one_of("backend", self.backend, tuple(BACKENDS))


@takes(AttentionTensors, SdpaOptions)
def sdpa_attention(tensors: AttentionTensors, options: SdpaOptions) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Equals ``softmax(q @ k.mT * scale) @ v``.

    Held for backward beside the result: the inputs and one number per row. Only the mask, if given, and the map, if
    kept, have size Q x K. The backend ``math`` materialises the scores; on a GPU it is chosen only where nothing else
    can run: in float64.
    """
    call, seen = prepared(tensors, options)
    backend, call = chosen(call, options.backend)
    heads, width = tensors.q.shape[1:3], tensors.v.shape[3]
    out_BHQV = call.run(backend, options.scale_of(tensors.q))[..., :width]
    out_BGRQV = seen.zero_blind(out_BHQV.unflatten(1, heads))
    return (out_BGRQV, map_of(tensors, options)) if options.keep_map else out_BGRQV


@takes(AttentionTensors, SdpaOptions)
def sdpa_backend(tensors: AttentionTensors, options: SdpaOptions) -> str:
    """Return the backend that ``sdpa_attention`` uses for the same arguments."""
    return chosen(prepared(tensors, options)[0], options.backend)[0]
