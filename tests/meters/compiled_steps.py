"""Steps with parts under ``torch.compile``, each as a builder for a meter: ``build(device) -> step``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import memfix
from memfix.errors import MeasurementError

Step = Callable[[], object]
WARMUP = 3
"""Calls before the measured one: the first compiles and tunes, and an optimizer compiles again with its state."""


class Block(nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, time, width = x.shape
        split = self.qkv(self.before_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


def compiled(module: Any, compiles: bool = True, **options: Any) -> Any:
    return torch.compile(module, **options) if compiles else module


def mlp_train(device: str, **options: Any) -> Step:
    with torch.device(device):
        mlp = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512), nn.Softmax(-1))
        x = torch.randn(4096, 512)
    run = compiled(mlp, **options)

    def step() -> None:
        run(x).square().mean().backward()
        mlp.zero_grad()

    return step


def block_train(device: str, **options: Any) -> Step:
    with torch.device(device):
        block, x = Block(512, 8), torch.randn(4, 1024, 512)
    run = compiled(block, **options)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = run(x).float().square().mean()
        loss.backward()
        block.zero_grad()

    return step


def block_inference(device: str, **options: Any) -> Step:
    with torch.device(device):
        block, x = Block(512, 8).to(torch.bfloat16).eval(), torch.randn(4, 1024, 512, dtype=torch.bfloat16)
    run = compiled(block, **options)

    @torch.no_grad()
    def step() -> torch.Tensor:
        return run(x)

    return step


def classifier_train(device: str, **options: Any) -> Step:
    """The backward of the loss writes into the logits that the forward kept."""
    with torch.device(device):
        head = nn.Linear(256, 8192, bias=False)
        x, target = torch.randn(2048, 256), torch.randint(0, 8192, (2048,))
    loss = compiled(lambda: F.cross_entropy(head(x), target), **options)

    def step() -> None:
        loss().backward()
        head.zero_grad()

    return step


def peak_after_a_step_that_imports_compilers() -> int:
    """The peak of ``classifier_train``, after a step that itself imports Inductor and then fails."""
    from torch.nn.attention.flex_attention import flex_attention

    def build(device: str) -> Step:
        x = torch.empty(1, 2, 64, 16, device=device)
        return lambda: flex_attention(x, x, x)

    with contextlib.suppress(MeasurementError):
        memfix.peak(build)
    return memfix.peak(classifier_train).peak_bytes


def adamw_step(device: str, layers: int = 4, **options: Any) -> Step:
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    return compiled(optimizer.step, **options)


STEPS = {build.__name__: build for build in (mlp_train, block_train, block_inference, classifier_train, adamw_step)}
