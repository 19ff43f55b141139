"""Cross entropy of a linear classifier: whole, by chunks, checkpointed, and with the gradient taken in forward.

T tokens, D width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf

WORKLOADS = Workloads()


def _classifier(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, D, V = 8192, 2048, 65536
    return leaf(T, D, device=device), leaf(V, D, device=device), torch.randint(0, V, (T,), device=device)


@WORKLOADS.add
def linear_ce_fwd_nograd(device: str) -> Step:
    hidden_TD, weight_VD, target_T = _classifier(device)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), target_T)

    return step


@WORKLOADS.add
def linear_ce_fwd(device: str) -> Step:
    hidden_TD, weight_VD, target_T = _classifier(device)
    return lambda: F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), target_T)


@WORKLOADS.add
def linear_ce_fwd_bwd(device: str) -> Step:
    hidden_TD, weight_VD, target_T = _classifier(device)

    def step() -> None:
        drop_gradients(hidden_TD, weight_VD)
        F.cross_entropy(F.linear(hidden_TD, weight_VD).float(), target_T).backward()

    return step


@WORKLOADS.add
def linear_ce_bf16_bwd(device: str) -> Step:
    hidden_TD, weight_VD, target_T = _classifier(device)

    def step() -> None:
        drop_gradients(hidden_TD, weight_VD)
        F.cross_entropy(F.linear(hidden_TD, weight_VD), target_T).backward()

    return step


def _by_chunks(device: str, *, checkpoint_reentrant: bool | None = None) -> Step:
    """Not checkpointed where ``checkpoint_reentrant`` is None."""
    hidden_TD, weight_VD, target_T = _classifier(device)

    def chunk_loss(hidden: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(hidden, weight_VD).float(), target, reduction="sum")

    def step() -> None:
        drop_gradients(hidden_TD, weight_VD)
        loss: Any = 0
        for hidden, target in zip(hidden_TD.chunk(8), target_T.chunk(8), strict=True):
            if checkpoint_reentrant is None:
                loss = loss + chunk_loss(hidden, target)
            else:
                loss = loss + checkpoint(chunk_loss, hidden, target, use_reentrant=checkpoint_reentrant)
        loss.backward()

    return step


@WORKLOADS.add
def chunked_ce(device: str) -> Step:
    return _by_chunks(device)


@WORKLOADS.add
def chunked_ce_ckpt(device: str) -> Step:
    return _by_chunks(device, checkpoint_reentrant=False)


@WORKLOADS.add
def chunked_ce_ckpt_reentrant(device: str) -> Step:
    return _by_chunks(device, checkpoint_reentrant=True)


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """The gradient is computed in forward, chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, rows_per_chunk: int
    ) -> torch.Tensor:
        grad_hidden_TD = torch.empty_like(hidden_TD)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        loss = torch.zeros((), device=hidden_TD.device, dtype=torch.float32)
        for start in range(0, hidden_TD.shape[0], rows_per_chunk):
            rows = slice(start, start + rows_per_chunk)
            hidden, target = hidden_TD[rows], target_T[rows]
            logits = (hidden @ weight_VD.t()).float()
            normalizer = logits.logsumexp(-1)
            loss += (normalizer - logits.gather(1, target[:, None]).squeeze(1)).sum()
            grad_logits = (logits - normalizer[:, None]).exp_()
            grad_logits.scatter_add_(1, target[:, None], torch.full_like(target[:, None], -1, dtype=torch.float32))
            grad_logits = grad_logits.to(hidden_TD.dtype)
            grad_hidden_TD[rows] = grad_logits @ weight_VD
            grad_weight_VD += grad_logits.t() @ hidden
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_TD * grad, grad_weight_VD * grad, None, None


@WORKLOADS.add
def fused_linear_ce_function(device: str) -> Step:
    hidden_TD, weight_VD, target_T = _classifier(device)

    def step() -> None:
        drop_gradients(hidden_TD, weight_VD)
        _FusedLinearCrossEntropy.apply(hidden_TD, weight_VD, target_T, 1024).backward()

    return step
