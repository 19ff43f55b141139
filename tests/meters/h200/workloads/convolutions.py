"""Convolutions, whose workspace is cuDNN's own choice."""

from __future__ import annotations

import torch
from torch import nn

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf

WORKLOADS = Workloads()


def _two_convolutions(dtype: torch.dtype, device: str) -> nn.Module:
    layers = nn.Sequential(nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.Conv2d(128, 64, 3, padding=1))
    return layers.to(device=device, dtype=dtype)


@WORKLOADS.add
def conv2d_fp32(device: str) -> Step:
    x = leaf(32, 64, 128, 128, device=device, dtype=torch.float32)
    model = _two_convolutions(torch.float32, device)

    def step() -> None:
        drop_gradients(x, model)
        model(x).sum().backward()

    return step


@WORKLOADS.add
def conv2d_bf16_cl(device: str) -> Step:
    x = leaf(32, 64, 128, 128, device=device)
    model = _two_convolutions(torch.bfloat16, device).to(memory_format=torch.channels_last)
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_()

    def step() -> None:
        drop_gradients(x, model)
        model(x).sum().backward()

    return step


@WORKLOADS.add
def conv_bn_relu(device: str) -> Step:
    x = leaf(32, 64, 128, 128, device=device, dtype=torch.float32)
    model = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()).to(device)

    def step() -> None:
        drop_gradients(x, model)
        model(x).sum().backward()

    return step
