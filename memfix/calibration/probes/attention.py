"""Attention, forward and backward, by every kernel that torch has for it."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .registry import Step, bf16, f16, f32, f64, probe


def _kernel(name: str) -> Any:
    """A context that selects the kernel ``name``, and the math fallback for calls that the kernel does not support."""
    if name == "default":
        return contextlib.nullcontext()
    return sdpa_kernel([getattr(SDPBackend, name.upper()), SDPBackend.MATH])


def _heads(device: str, layout: str, shape: tuple[int, int, int, int]) -> Any:
    """Query, key and value of ``shape``, and the leaves that they are views of."""
    B, H, L, D = shape
    tensor_options = {"device": device, "dtype": bf16, "requires_grad": True}
    if layout == "packed":
        packed = torch.randn(B, L, 3, H, D, **tensor_options)
        return packed.permute(2, 0, 3, 1, 4).unbind(0), [packed]
    leaves = [torch.randn(B, L, H, D, **tensor_options) for _ in range(3)]
    return [leaf.transpose(1, 2) for leaf in leaves], leaves


def _step(kernel: str, inputs: Any, leaves: list[torch.Tensor], *, upstream: torch.Tensor, **options: Any) -> Step:
    def step() -> None:
        with _kernel(kernel):
            out = F.scaled_dot_product_attention(*inputs, **options)
        out.backward(upstream)
        for leaf in leaves:
            leaf.grad = None

    return step


def _attention(
    device: str,
    kernel: str,
    shape: tuple[int, int, int, int],
    *,
    keys: int | None = None,
    key_heads: int | None = None,
    dtype: torch.dtype = bf16,
    trained: bool = True,
    **options: Any,
) -> Step:
    B, H, L, D = shape
    tensor_options = {"device": device, "dtype": dtype, "requires_grad": trained}
    query = torch.randn(shape, **tensor_options)
    key, value = (torch.randn(B, key_heads or H, keys or L, D, **tensor_options) for _ in range(2))
    if trained:
        leaves = [query, key, value]
        return _step(kernel, leaves, leaves, upstream=torch.randn(shape, device=device, dtype=dtype), **options)

    def step() -> torch.Tensor:
        with torch.no_grad(), _kernel(kernel):
            return F.scaled_dot_product_attention(query, key, value, **options)

    return step


# ---------------------------------------------------------------- shapes
_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention")
_FLASH_AND_CUDNN = ("flash_attention", "cudnn_attention")

probe("attention_width", kernel=_KERNELS, width=(32, 40, 64, 72, 96, 128, 192, 256))(
    lambda device, kernel, width: _attention(device, kernel, (2, 8, 1024, width), is_causal=True)
)
probe("attention_width_in_float32", kernel=("efficient_attention",), width=(32, 36, 64, 100, 128, 192, 256))(
    lambda device, kernel, width: _attention(device, kernel, (2, 8, 1024, width), dtype=f32)
)
probe("attention_padded_width", kernel=("flash_attention",), width=(33, 60, 100))(
    lambda device, kernel, width: _attention(device, kernel, (2, 8, 1000, width))
)
probe("attention_length", kernel=_KERNELS, length=(2, 17, 128, 1000, 2048, 4096, 8192))(
    lambda device, kernel, length: _attention(device, kernel, (1, 4, length, 64))
)
probe("attention_other_number_of_keys", kernel=_KERNELS, queries=(1, 17, 500), keys=(128, 8192))(
    lambda device, kernel, queries, keys: _attention(device, kernel, (2, 4, queries, 64), keys=keys)
)
probe("attention_batch_and_heads", kernel=_FLASH_AND_CUDNN, batch=(1, 16), heads=(1, 12, 32))(
    lambda device, kernel, batch, heads: _attention(device, kernel, (batch, heads, 512, 128), is_causal=True)
)
probe("attention_splits_of_keys", kernel=("efficient_attention",), batch=(1, 20), heads=(16,), width=(64, 160))(
    lambda device, kernel, batch, heads, width: _attention(device, kernel, (batch, heads, 100, width))
)
probe("attention_grouped", kernel=_FLASH_AND_CUDNN, length=(1024, 1000), key_heads=(1, 4), width=(128,))(
    lambda device, kernel, length, key_heads, width: _attention(
        device, kernel, (2, 16, length, width), key_heads=key_heads, enable_gqa=True
    )
)


# ---------------------------------------------------------------- layouts, masks, dropout, dtypes
@probe(kernel=_KERNELS, layout=("transposed", "packed"), length=(1000, 1024))
def _attention_layout(device: str, kernel: str, layout: str, length: int) -> Step:
    views, leaves = _heads(device, layout, (2, 8, length, 64))
    upstream = torch.randn(2, length, 8, 64, device=device, dtype=bf16).transpose(1, 2)
    return _step(kernel, views, leaves, upstream=upstream, is_causal=True)


_MASKS = ((1000, 1000), (2, 1, 1, 1000), (2, 8, 1000, 1000))
probe(
    "attention_masked", kernel=("default", "efficient_attention", "math"), mask=_MASKS, mask_dtype=(torch.bool, bf16)
)(
    lambda device, kernel, mask, mask_dtype: _attention(
        device, kernel, (2, 8, 1000, 64), attn_mask=torch.ones(mask, device=device, dtype=mask_dtype)
    )
)
probe("attention_dropout", kernel=(*_KERNELS, "default"), dropout=(0.1, 0.125))(
    lambda device, kernel, dropout: _attention(device, kernel, (2, 8, 1024, 64), dropout_p=dropout)
)
probe("attention_dtype", kernel=("default", "math"), dtype=(f16, f32, f64))(
    lambda device, kernel, dtype: _attention(device, kernel, (2, 8, 1000, 64), dtype=dtype, is_causal=True)
)
probe("attention_without_gradient", kernel=(*_KERNELS, "default"), queries=(1, 1024))(
    lambda device, kernel, queries: _attention(device, kernel, (2, 16, queries, 128), keys=1024, trained=False)
)
probe("attention_grouped_decoding", queries=(1,), key_heads=(1, 4))(
    lambda device, queries, key_heads: _attention(
        device, "flash_attention", (4, 16, queries, 128), keys=4096, key_heads=key_heads, trained=False, enable_gqa=True
    )
)
