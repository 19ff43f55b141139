"""Elementwise chains, in place and not, with gradients that fan in."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from memfix.meters.base import Step

from .registry import MIB, Workloads, drop_gradients, leaf, normal

WORKLOADS = Workloads()


@WORKLOADS.add
def inplace_chain(device: str) -> Step:
    x = normal(128 * MIB, device=device)

    def step() -> torch.Tensor:
        y = x.clone()
        y.mul_(2).add_(1).relu_().sigmoid_()
        z = y * 2
        z += y
        z.clamp_(min=0)
        return z

    return step


@WORKLOADS.add
def fanout_accumulate(device: str) -> Step:
    """One tensor used five times: the engine adds up its gradient in place."""
    x = leaf(64 * MIB, device=device)

    def step() -> None:
        drop_gradients(x)
        y = x * 2
        (y.sin() + y.cos() + y.tanh() + y.exp() + y).sum().backward()

    return step


@WORKLOADS.add
def cat_chunks(device: str) -> Step:
    x = normal(16384, 8192, device=device)
    return lambda: torch.cat([(chunk * 2).relu() for chunk in x.chunk(8)], 0)


@WORKLOADS.add
def where_bwd(device: str) -> Step:
    x, y = (leaf(16384, 8192, device=device) for _ in range(2))

    def step() -> None:
        drop_gradients(x, y)
        torch.where(x > 0, x, y * 0.5).sum().backward()

    return step


@WORKLOADS.add
def dropout_bwd(device: str) -> Step:
    x = leaf(16384, 8192, device=device)

    def step() -> None:
        drop_gradients(x)
        F.dropout(x, 0.1).sum().backward()

    return step


@WORKLOADS.add
def gelu_bwd(device: str) -> Step:
    x = leaf(32768, 8192, device=device)

    def step() -> None:
        drop_gradients(x)
        F.gelu(x).sum().backward()

    return step


@WORKLOADS.add
def noncontig_softmax(device: str) -> Step:
    x = leaf(16384, 8192, device=device)

    def step() -> None:
        drop_gradients(x)
        x.t().softmax(-1).sum().backward()

    return step


class _RecomputedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        return F.silu(gate) * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, gate = ctx.saved_tensors
        sigmoid = torch.sigmoid(gate)
        grad_x = grad * (gate * sigmoid)
        grad_gate = grad * x * (sigmoid * (1 + gate * (1 - sigmoid)))
        return grad_x, grad_gate


@WORKLOADS.add
def custom_function_recompute(device: str) -> Step:
    x, gate = (leaf(16384, 8192, device=device) for _ in range(2))

    def step() -> None:
        drop_gradients(x, gate)
        _RecomputedSwiGLU.apply(x, gate).sum().backward()

    return step
