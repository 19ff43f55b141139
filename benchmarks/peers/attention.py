"""Attention compared with each of torch's backends, and with torch's own choice of a backend.

``sdpa`` must be within 2 % of the fastest of them. In float32 only the backends efficient and math can run.
"""

# B batch, G key-value heads, R query heads of each, Q queries, K keys, D width of a head

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import sdpa_kernel

from memfix.ops.attention.backends import BACKENDS

from . import Comparison, Entry, Peer, Table


def _torchs(backend: str | None) -> Callable[..., Any]:
    """Return torch's function in the layout of the contract, with one backend or torch's choice."""

    def attention(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
    ) -> torch.Tensor:
        given = mask if mask is None else mask.flatten(1, 2)
        with contextlib.nullcontext() if backend is None else sdpa_kernel(BACKENDS[backend]):
            out = F.scaled_dot_product_attention(
                q.flatten(1, 2), k, v, given, is_causal=causal, scale=scale, enable_gqa=q.shape[2] > 1
            )
        return out.unflatten(1, q.shape[1:3])

    return attention


_FORMS = ("naive", "query_chunks", "sdpa")
_IN_FLOAT32 = ("torch", "torch_efficient", "torch_math")
_WITH_A_MASK = ("torch", "torch_cudnn", "torch_efficient", "torch_math")
_BFLOAT16 = "dtype=bfloat16"

COMPARISON = Comparison(
    peers={
        "torch": Peer("torch", functools.partial(_torchs, None)),
        **{f"torch_{backend}": Peer("torch", functools.partial(_torchs, backend)) for backend in BACKENDS},
    },
    tables={
        "shapes": Table(
            [
                Entry("incident", "", peers=_IN_FLOAT32),
                Entry("incident_bf16"),
                Entry("cross", "", forms=_FORMS, peers=_IN_FLOAT32),
                Entry("cross, bfloat16", f"K=256 {_BFLOAT16}", forms=_FORMS),
                Entry("latents, bfloat16", f"Q=256 K=256 {_BFLOAT16}", forms=_FORMS),
                Entry("masked", "", forms=_FORMS, peers=("torch", "torch_efficient", "torch_math")),
                Entry("masked, bfloat16", f"B=8 present=mask {_BFLOAT16}", forms=_FORMS, peers=_WITH_A_MASK),
                Entry("grouped", "", forms=_FORMS, peers=("torch", "torch_cudnn", "torch_flash", "torch_math")),
            ],
            phases=("train", "forward"),
            simulated=True,
        ),
        "heads": Table(
            [
                Entry(f"{heads} heads of {width}", f"G={heads} D={width} B=16 {_BFLOAT16}", forms=("sdpa",))
                for heads, width in ((1, 128), (4, 128), (8, 64), (16, 32), (16, 128))
            ],
        ),
    },
    error_at={"B": 2, "G": 4, "Q": 256, "K": 256},
)
