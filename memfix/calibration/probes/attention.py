"""Attention, forward and backward, by every kernel that torch has for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...meters.base import Step
from .registry import probe

_HALF = torch.bfloat16


def _kernel(name: str) -> Any:
    """A context in which ``name`` runs, or math where it refuses: that is an answer too."""
    if name == "default":
        return contextlib.nullcontext()
    return sdpa_kernel([getattr(SDPBackend, name.upper()), SDPBackend.MATH])


def _heads(device: str, layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, count: int) -> Any:
    """``count`` tensors of ``shape``, and the leaves whose gradients the step throws away."""
    B, H, L, D = shape
    if layout == "packed":
        packed = torch.randn(B, L, count, H, D, device=device, dtype=dtype, requires_grad=True)
        return packed.permute(2, 0, 3, 1, 4).unbind(0), [packed]
    if layout == "transposed":
        leaves = [torch.randn(B, L, H, D, device=device, dtype=dtype, requires_grad=True) for _ in range(count)]
        return [leaf.transpose(1, 2) for leaf in leaves], leaves
    leaves = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(count)]
    return leaves, leaves


def _step(kernel: str, inputs: Any, leaves: list[torch.Tensor], *, upstream: torch.Tensor, **options: Any) -> Step:
    def step() -> None:
        query, key, value = inputs()
        with _kernel(kernel):
            out = F.scaled_dot_product_attention(query, key, value, **options)
        out.backward(upstream)
        for leaf in leaves:
            leaf.grad = None

    return step


def _plain(
    device: str,
    kernel: str,
    shape: tuple[int, int, int, int],
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    dtype: torch.dtype = _HALF,
    **options: Any,
) -> Step:
    B, H, L, D = shape
    query = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    key, value = (
        torch.randn(B, key_heads or H, keys or L, D, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
    )
    upstream = torch.randn(shape, device=device, dtype=dtype)
    leaves = [query, key, value]
    return _step(kernel, lambda: leaves, leaves, upstream=upstream, **options)


# ---------------------------------------------------------------- shapes
@probe(kernel=("flash_attention", "efficient_attention", "cudnn_attention"), width=(32, 40, 64, 72, 96, 128, 192, 256))
def _attention_width(device: str, kernel: str, width: int) -> Step:
    return _plain(device, kernel, (2, 8, 1024, width), is_causal=True)


@probe(kernel=("efficient_attention",), width=(32, 36, 64, 100, 128, 192, 256))
def _attention_width_in_float32(device: str, kernel: str, width: int) -> Step:
    return _plain(device, kernel, (2, 8, 1024, width), dtype=torch.float32)


@probe(kernel=("flash_attention",), width=(33, 60, 100))
def _attention_padded_width(device: str, kernel: str, width: int) -> Step:
    return _plain(device, kernel, (2, 8, 1000, width))


@probe(
    kernel=("flash_attention", "efficient_attention", "cudnn_attention"),
    length=(2, 17, 128, 1000, 2048, 4096, 8192),
)
def _attention_length(device: str, kernel: str, length: int) -> Step:
    return _plain(device, kernel, (1, 4, length, 64))


@probe(kernel=("flash_attention", "efficient_attention", "cudnn_attention"), queries=(1, 17, 500), keys=(128, 8192))
def _attention_other_number_of_keys(device: str, kernel: str, queries: int, keys: int) -> Step:
    return _plain(device, kernel, (2, 4, queries, 64), keys=keys)


@probe(kernel=("flash_attention", "cudnn_attention"), batch=(1, 16), heads=(1, 12, 32))
def _attention_batch_and_heads(device: str, kernel: str, batch: int, heads: int) -> Step:
    return _plain(device, kernel, (batch, heads, 512, 128), is_causal=True)


@probe(kernel=("efficient_attention",), batch=(1, 20), heads=(16,), width=(64, 160))
def _attention_splits_of_keys(device: str, kernel: str, batch: int, heads: int, width: int) -> Step:
    return _plain(device, kernel, (batch, heads, 100, width))


@probe(kernel=("flash_attention", "cudnn_attention"), length=(1024, 1000), key_heads=(1, 4), width=(128,))
def _attention_grouped(device: str, kernel: str, length: int, key_heads: int, width: int) -> Step:
    return _plain(device, kernel, (2, 16, length, width), key_heads=key_heads, enable_gqa=True)


# ---------------------------------------------------------------- layouts, masks, dropout, dtypes
@probe(
    kernel=("flash_attention", "efficient_attention", "cudnn_attention"),
    layout=("transposed", "packed"),
    length=(1000, 1024),
)
def _attention_layout(device: str, kernel: str, layout: str, length: int) -> Step:
    views, leaves = _heads(device, layout, (2, 8, length, 64), _HALF, 3)
    upstream = torch.randn(2, length, 8, 64, device=device, dtype=_HALF).transpose(1, 2)
    return _step(kernel, lambda: views, leaves, upstream=upstream, is_causal=True)


@probe(
    kernel=("default", "efficient_attention", "math"),
    mask=((1000, 1000), (2, 1, 1, 1000), (2, 8, 1000, 1000)),
    mask_dtype=(torch.bool, _HALF),
)
def _attention_masked(device: str, kernel: str, mask: tuple[int, ...], mask_dtype: torch.dtype) -> Step:
    values = torch.ones(mask, device=device, dtype=mask_dtype)
    return _plain(device, kernel, (2, 8, 1000, 64), attn_mask=values)


@probe(kernel=("flash_attention", "efficient_attention", "cudnn_attention", "default"), dropout=(0.1, 0.125))
def _attention_dropout(device: str, kernel: str, dropout: float) -> Step:
    return _plain(device, kernel, (2, 8, 1024, 64), dropout_p=dropout)


@probe(kernel=("default", "math"), dtype=(torch.float16, torch.float32, torch.float64))
def _attention_dtype(device: str, kernel: str, dtype: torch.dtype) -> Step:
    return _plain(device, kernel, (2, 8, 1000, 64), dtype=dtype, is_causal=True)


@probe(kernel=("flash_attention", "efficient_attention", "cudnn_attention", "default"), queries=(1, 1024))
def _attention_without_gradient(device: str, kernel: str, queries: int) -> Step:
    query = torch.randn(2, 16, queries, 128, device=device, dtype=_HALF)
    key, value = (torch.randn(2, 16, 1024, 128, device=device, dtype=_HALF) for _ in range(2))

    def step() -> torch.Tensor:
        with torch.no_grad(), _kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value)

    return step


@probe(queries=(1,), key_heads=(1, 4))
def _attention_grouped_decoding(device: str, queries: int, key_heads: int) -> Step:
    query = torch.randn(4, 16, queries, 128, device=device, dtype=_HALF)
    key, value = (torch.randn(4, key_heads, 4096, 128, device=device, dtype=_HALF) for _ in range(2))

    def step() -> torch.Tensor:
        with torch.no_grad(), _kernel("flash_attention"):
            return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    return step
