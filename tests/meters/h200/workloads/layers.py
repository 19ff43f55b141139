"""Norms, feed-forwards, rotary positions and mixed precision, as layers of a model."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf, normal

WORKLOADS = Workloads()


@WORKLOADS.add
def ln_geglu_ff(device: str) -> Step:
    width, hidden_width = 2048, 8192
    x = leaf(16384, width, device=device)
    norm = nn.LayerNorm(width, device=device, dtype=torch.bfloat16)
    up = nn.Linear(width, 2 * hidden_width, device=device, dtype=torch.bfloat16)
    down = nn.Linear(hidden_width, width, device=device, dtype=torch.bfloat16)

    def step() -> None:
        drop_gradients(x, norm, up, down)
        value, gate = up(norm(x)).chunk(2, -1)
        (x + down(value * F.gelu(gate))).sum().backward()

    return step


@WORKLOADS.add
def rmsnorm_manual(device: str) -> Step:
    x, weight = leaf(32768, 4096, device=device), leaf(4096, device=device)

    def step() -> None:
        drop_gradients(x, weight)
        normed = x.float()
        normed = normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + 1e-6)
        (weight * normed.to(x.dtype)).sum().backward()

    return step


@WORKLOADS.add
def rmsnorm_nn(device: str) -> Step:
    x = leaf(32768, 4096, device=device)
    norm = nn.RMSNorm(4096, device=device, dtype=torch.bfloat16)

    def step() -> None:
        drop_gradients(x, norm)
        norm(x).sum().backward()

    return step


@WORKLOADS.add
def layernorm_bwd(device: str) -> Step:
    x = leaf(131072, 1024, device=device)
    norm = nn.LayerNorm(1024, device=device, dtype=torch.bfloat16)

    def step() -> None:
        drop_gradients(x, norm)
        norm(x).sum().backward()

    return step


def _rotated_half(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


@WORKLOADS.add
def rope(device: str) -> Step:
    tokens, width = 4096, 128
    q = leaf(2, 32, tokens, width, device=device)
    frequencies = 1.0 / (10000 ** (torch.arange(0, width, 2, device=device).float() / width))

    def step() -> None:
        drop_gradients(q)
        angles = torch.outer(torch.arange(tokens, device=device).float(), frequencies)
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos().to(torch.bfloat16), angles.sin().to(torch.bfloat16)
        (q * cos + _rotated_half(q) * sin).sum().backward()

    return step


@WORKLOADS.add
def residual_chain(device: str) -> Step:
    x = leaf(16384, 4096, device=device)
    weights = [leaf(4096, 4096, device=device) for _ in range(4)]

    def step() -> None:
        drop_gradients(x, *weights)
        hidden = x
        for weight in weights:
            hidden = hidden + torch.tanh(hidden @ weight)
        hidden.sum().backward()

    return step


@WORKLOADS.add
def grad_accumulation(device: str) -> Step:
    model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096))
    model = model.to(device=device, dtype=torch.bfloat16)
    batches = [normal(8192, 4096, device=device) for _ in range(4)]

    def step() -> None:
        drop_gradients(model)
        for x in batches:
            model(x).float().pow(2).mean().backward()

    return step


@WORKLOADS.add
def amp_autocast(device: str) -> Step:
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.LayerNorm(8192), nn.Linear(8192, 2048)).to(device)
    x = normal(16384, 2048, device=device, dtype=torch.float32)

    def step() -> None:
        drop_gradients(model)
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(x).float().pow(2).mean()
        loss.backward()

    return step


@WORKLOADS.add
def amp_gradscaler_fp16(device: str) -> Step:
    model = nn.Sequential(nn.Linear(2048, 8192), nn.GELU(), nn.Linear(8192, 2048)).to(device)
    x = normal(16384, 2048, device=device, dtype=torch.float32)
    scaler = torch.amp.GradScaler(device)

    def step() -> None:
        drop_gradients(model)
        with torch.autocast(device, dtype=torch.float16):
            loss = model(x).float().pow(2).mean()
        scaler.scale(loss).backward()

    return step
