"""``F.scaled_dot_product_attention`` by each backend, and by the one that torch chooses."""

from __future__ import annotations

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from memfix.meters.base import Step, StepBuilder

from .registry import Workloads, drop_gradients, leaf


def _attention(
    backend: SDPBackend | None,
    *,
    dtype: torch.dtype = torch.bfloat16,
    size: tuple[int, int, int, int] = (2, 16, 4096, 64),
    kv_heads: int | None = None,
    bool_mask: bool = False,
    causal: bool = True,
) -> StepBuilder:
    """``size`` is batch, heads, tokens, width; ``kv_heads`` where keys and values have fewer heads."""
    batch, heads, tokens, width = size

    def build(device: str) -> Step:
        q, k, v = (
            leaf(batch, num_heads, tokens, width, device=device, dtype=dtype)
            for num_heads in (heads, kv_heads or heads, kv_heads or heads)
        )
        mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril() if bool_mask else None

        def step() -> None:
            drop_gradients(q, k, v)
            with sdpa_kernel(backend) if backend else contextlib.nullcontext():
                mixed = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=kv_heads is not None
                )
            mixed.sum().backward()

        return step

    return build


_CUDNN, _EFFICIENT = SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION
_FLASH, _MATH = SDPBackend.FLASH_ATTENTION, SDPBackend.MATH

WORKLOADS = Workloads(
    sdpa_flash_bf16=_attention(_FLASH),
    sdpa_flash_gqa=_attention(_FLASH, kv_heads=4),
    sdpa_flash_d128=_attention(_FLASH, size=(1, 16, 8192, 128)),
    sdpa_flash_split=_attention(_FLASH, size=(1, 2, 512, 64), causal=False),
    sdpa_eff_bf16=_attention(_EFFICIENT),
    sdpa_eff_fp32=_attention(_EFFICIENT, dtype=torch.float32),
    sdpa_eff_boolmask=_attention(_EFFICIENT, bool_mask=True),
    sdpa_eff_d128=_attention(_EFFICIENT, size=(1, 16, 8192, 128)),
    sdpa_cudnn_bf16=_attention(_CUDNN),
    sdpa_cudnn_gqa=_attention(_CUDNN, kv_heads=4),
    sdpa_cudnn_d128=_attention(_CUDNN, size=(1, 16, 8192, 128)),
    sdpa_math_bf16=_attention(_MATH),
    sdpa_math_fp32=_attention(_MATH, dtype=torch.float32),
    sdpa_math_boolmask=_attention(_MATH, dtype=torch.float32, bool_mask=True),
    sdpa_default_bf16=_attention(None),
    sdpa_default_fp32=_attention(None, dtype=torch.float32),
)
