"""The kernels by which FSDP2 packs tensors before a collective and unpacks them after it."""

from __future__ import annotations

from functools import partial

import torch

from .registry import Step, bf16, f32, probe

_SHARDS = (7, 1000, 300 * 1000, 4096 * 1024)


@probe(ranks=(1, 2, 8, 64), dtype=(bf16, f32))
def _unpack_gathered(device: str, ranks: int, dtype: torch.dtype) -> Step:
    gathered = torch.rand(ranks, sum(_SHARDS), device=device).to(dtype)
    out = [torch.empty(ranks, size, device=device, dtype=dtype) for size in _SHARDS]
    return partial(torch.split_with_sizes_copy, gathered, _SHARDS, dim=1, out=out)


@probe(ranks=(1, 2, 8, 64), dtype=(bf16, f32))
def _pack_gradients(device: str, ranks: int, dtype: torch.dtype) -> Step:
    gradients = [torch.rand(*size, device=device).to(dtype) for size in ((7,), (300, 1000), (4096, 1024), (129, 3, 5))]
    rows = sum(-(-tensor.shape[0] // ranks) * tensor[0].numel() for tensor in gradients)
    out = torch.empty(ranks, rows, device=device, dtype=f32)
    return partial(torch._chunk_cat, gradients, dim=0, num_chunks=ranks, out=out)
