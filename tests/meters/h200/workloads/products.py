"""Matrix products and contractions, contiguous and not."""

from __future__ import annotations

import torch

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf, normal

WORKLOADS = Workloads()


@WORKLOADS.add
def matmul_bf16(device: str) -> Step:
    a, b = normal(16384, 8192, device=device), normal(8192, 16384, device=device)
    return lambda: a @ b


@WORKLOADS.add
def matmul_fp32_bwd(device: str) -> Step:
    a, b = (leaf(8192, 8192, device=device, dtype=torch.float32) for _ in range(2))

    def step() -> None:
        drop_gradients(a, b)
        (a @ b).sum().backward()

    return step


@WORKLOADS.add
def noncontig_matmul(device: str) -> Step:
    pairs = normal(8192, 8192, 2, device=device)
    weight = normal(8192, 8192, device=device)
    return lambda: pairs[..., 0] @ weight


@WORKLOADS.add
def einsum3(device: str) -> Step:
    batch, tokens, rank, rows, columns = 2, 512, 32, 256, 512
    x = leaf(batch, tokens, rank, device=device)
    u, v = leaf(rows, rank, device=device), leaf(rank, columns, device=device)

    def step() -> None:
        drop_gradients(x, u, v)
        torch.einsum("bsr,dr,rf->bsdf", x, u, v).sum().backward()

    return step


@WORKLOADS.add
def einsum_bhqk(device: str) -> Step:
    q, k = (leaf(2, 2048, 16, 64, device=device) for _ in range(2))

    def step() -> None:
        drop_gradients(q, k)
        torch.einsum("bqhd,bkhd->bhqk", q, k).sum().backward()

    return step


@WORKLOADS.add
def repeat_kv_bmm(device: str) -> Step:
    batch, kv_heads, group, tokens, width = 2, 4, 4, 2048, 128
    k = leaf(batch, kv_heads, tokens, width, device=device)
    q = leaf(batch, kv_heads * group, tokens, width, device=device)

    def step() -> None:
        drop_gradients(k, q)
        repeated = k[:, :, None].expand(batch, kv_heads, group, tokens, width)
        repeated = repeated.reshape(batch, kv_heads * group, tokens, width)
        (q @ repeated.transpose(-1, -2)).sum().backward()

    return step
