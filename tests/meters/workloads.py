"""Small steps of everyday training code, each as a builder for a meter: ``build(device) -> step``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

Step = Callable[[], object]
WORKLOADS: dict[str, Callable[[str], Step]] = {}


def workload(build: Callable[[str], Step]) -> Callable[[str], Step]:
    WORKLOADS[build.__name__] = build
    return build


def trained(leaves: list[torch.Tensor], loss: Callable[[], torch.Tensor]) -> Step:
    def step() -> None:
        loss().backward()
        for leaf in leaves:
            leaf.grad = None

    return step


def leaf(*size: int, device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*size, device=device, dtype=dtype).requires_grad_()


@workload
def matmul(device: str) -> Step:
    a, b = leaf(1024, 512, device=device), leaf(512, 2048, device=device)
    return trained([a, b], lambda: (a @ b).sum())


@workload
def batched_matmul_of_transposed(device: str) -> Step:
    a, b = leaf(8, 256, 128, device=device), leaf(8, 512, 128, device=device)
    return trained([a, b], lambda: (a @ b.transpose(1, 2)).float().pow(2).mean())


@workload
def strided_matmul_operand(device: str) -> Step:
    a, b = leaf(512, 1024, device=device), leaf(512, 256, device=device)
    return trained([a, b], lambda: (a[:, ::2] @ b).sum())


@workload
def linear_with_bias(device: str) -> Step:
    layer = torch.nn.Linear(512, 1024, device=device, dtype=torch.bfloat16)
    x = leaf(2048, 512, device=device)
    return trained([x, *layer.parameters()], lambda: F.gelu(layer(x)).sum())


@workload
def softmax_attention(device: str) -> Step:
    q, k, v = (leaf(4, 512, 64, device=device) for _ in range(3))
    return trained([q, k, v], lambda: ((q @ k.transpose(1, 2)).softmax(-1) @ v).sum())


@workload
def softmax_over_rows_of_transposed(device: str) -> Step:
    x = leaf(512, 2048, device=device, dtype=torch.float32)
    return trained([x], lambda: x.T.softmax(-1).pow(2).sum())


@workload
def cross_entropy_in_float32(device: str) -> Step:
    logits = leaf(2048, 4096, device=device)
    target = torch.randint(0, 4096, (2048,), device=device)
    return trained([logits], lambda: F.cross_entropy(logits.float(), target))


@workload
def cross_entropy_with_smoothing(device: str) -> Step:
    logits = leaf(1024, 4096, device=device, dtype=torch.float32)
    target = torch.randint(0, 4096, (1024,), device=device)
    return trained([logits], lambda: F.cross_entropy(logits, target, label_smoothing=0.1))


@workload
def elementwise_chain(device: str) -> Step:
    x = leaf(1 << 20, device=device, dtype=torch.float32)
    return trained([x], lambda: ((x * 2 + 1).sigmoid() * x.tanh()).exp().sum())


@workload
def in_place_chain(device: str) -> Step:
    x = leaf(1 << 20, device=device)
    return trained([x], lambda: x.mul(2).add_(1).relu_().sum())


@workload
def gradient_fan_in(device: str) -> Step:
    x = leaf(1024, 1024, device=device)
    return trained([x], lambda: (x.sin() + x.cos() + x * x + x.exp()).sum())


@workload
def embedding_of_many_ids(device: str) -> Step:
    table = leaf(5000, 256, device=device)
    ids = torch.randint(0, 5000, (8, 1024), device=device)
    return trained([table], lambda: F.embedding(ids, table).float().pow(2).sum())


@workload
def embedding_of_few_ids(device: str) -> Step:
    table = leaf(5000, 256, device=device, dtype=torch.float32)
    ids = torch.randint(0, 5000, (2048,), device=device)
    return trained([table], lambda: F.embedding(ids, table).pow(2).sum())


def _block(x: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    return x + F.silu(x @ w1) @ w2


def _checkpointed(device: str, use_reentrant: bool) -> Step:
    x = leaf(2048, 256, device=device)
    weights = [leaf(*size, device=device) for _ in range(3) for size in ((256, 1024), (1024, 256))]

    def loss() -> torch.Tensor:
        h = x
        for w1, w2 in zip(weights[::2], weights[1::2], strict=True):
            h = checkpoint(_block, h, w1, w2, use_reentrant=use_reentrant)
        return h.float().pow(2).mean()

    return trained([x, *weights], loss)


@workload
def checkpoint_without_reentry(device: str) -> Step:
    return _checkpointed(device, use_reentrant=False)


@workload
def checkpoint_with_reentry(device: str) -> Step:
    return _checkpointed(device, use_reentrant=True)


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return (x @ w).relu_()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        grad = grad * (x @ w > 0)
        return grad @ w.T, x.T @ grad


@workload
def custom_function_that_recomputes(device: str) -> Step:
    x, w = leaf(2048, 512, device=device), leaf(512, 1024, device=device)
    return trained([x, w], lambda: _Recomputed.apply(x, w).sum())


@workload
def tied_weight(device: str) -> Step:
    table = leaf(4000, 256, device=device)
    ids = torch.randint(0, 4000, (4096,), device=device)
    return trained([table], lambda: F.cross_entropy((F.embedding(ids, table) @ table.T).float(), ids))


@workload
def one_hot_product(device: str) -> Step:
    table = leaf(2000, 128, device=device)
    ids = torch.randint(0, 2000, (1024,), device=device)
    return trained([table], lambda: (F.one_hot(ids, 2000).to(table.dtype) @ table).sum())


@workload
def masked_mean(device: str) -> Step:
    x = leaf(256, 4096, device=device, dtype=torch.float32)
    mask = torch.randint(0, 2, (256, 4096), device=device).bool()
    return trained([x], lambda: x.masked_fill(mask, 0).sum() / mask.sum())


@workload
def logsumexp_rows(device: str) -> Step:
    x = leaf(1024, 4096, device=device, dtype=torch.float32)
    return trained([x], lambda: x.logsumexp(-1).mean())
