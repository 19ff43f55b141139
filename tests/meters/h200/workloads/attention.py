"""Attention written out, from a packed projection, and as torch's module."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf

WORKLOADS = Workloads()


@WORKLOADS.add
def attn_naive_bf16(device: str) -> Step:
    q, k, v = (leaf(2, 16, 4096, 64, device=device) for _ in range(3))

    def step() -> None:
        drop_gradients(q, k, v)
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        (scores.softmax(-1) @ v).sum().backward()

    return step


@WORKLOADS.add
def attn_naive_causal_fp32softmax(device: str) -> Step:
    tokens = 4096
    q, k, v = (leaf(2, 16, tokens, 64, device=device) for _ in range(3))

    # every name below is alive in backward, as it is in code people write
    def step() -> None:
        drop_gradients(q, k, v)
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=device).triu(1)
        scores = (q @ k.transpose(-1, -2)) * (q.shape[-1] ** -0.5)
        weights = scores.masked_fill(future, float("-inf")).float().softmax(-1).to(q.dtype)
        (weights @ v).sum().backward()

    return step


@WORKLOADS.add
def sdpa_from_packed_qkv(device: str) -> Step:
    batch, tokens, heads, head_width = 2, 4096, 16, 64
    width = heads * head_width
    x = leaf(batch, tokens, width, device=device)
    qkv_weight = leaf(3 * width, width, device=device)
    out_weight = leaf(width, width, device=device)

    def step() -> None:
        drop_gradients(x, qkv_weight, out_weight)
        q, k, v = F.linear(x, qkv_weight).view(batch, tokens, 3, heads, head_width).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        F.linear(mixed.transpose(1, 2).reshape(batch, tokens, width), out_weight).sum().backward()

    return step


@WORKLOADS.add
def mha_module(device: str) -> Step:
    attention = nn.MultiheadAttention(1024, 16, batch_first=True, device=device, dtype=torch.bfloat16)
    x = leaf(4, 2048, 1024, device=device)

    def step() -> None:
        drop_gradients(x, attention)
        attention(x, x, x, need_weights=False)[0].sum().backward()

    return step
