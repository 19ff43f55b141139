"""Optimizer steps and gradient clipping over eight square parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from memfix.meters.base import Step, StepBuilder

from .registry import Workloads


def _parameters_with_gradients(device: str) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.randn(4096, 4096, device=device)) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return parameters


def _optimized(optimizer: type[torch.optim.Optimizer], **options: Any) -> StepBuilder:
    def build(device: str) -> Step:
        return optimizer(_parameters_with_gradients(device), lr=1e-3, **options).step

    return build


WORKLOADS = Workloads(
    adamw_default=_optimized(torch.optim.AdamW),
    adamw_foreach=_optimized(torch.optim.AdamW, foreach=True),
    adamw_forloop=_optimized(torch.optim.AdamW, foreach=False),
    adamw_fused=_optimized(torch.optim.AdamW, fused=True),
    sgd_momentum=_optimized(torch.optim.SGD, momentum=0.9),
)


@WORKLOADS.add
def clip_grad_norm(device: str) -> Step:
    parameters = _parameters_with_gradients(device)
    return lambda: nn.utils.clip_grad_norm_(parameters, 1.0)
