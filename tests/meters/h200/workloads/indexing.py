"""Rows and elements picked by index, and the gradients scattered back."""

from __future__ import annotations

import torch
from torch import nn

from memfix.meters.base import Step

from .registry import Workloads, drop_gradients, leaf

WORKLOADS = Workloads()


@WORKLOADS.add
def embedding_bwd(device: str) -> Step:
    embedding = nn.Embedding(50_000, 2048, device=device, dtype=torch.bfloat16)
    ids = torch.randint(0, 50_000, (32768,), device=device)

    def step() -> None:
        drop_gradients(embedding)
        embedding(ids).sum().backward()

    return step


@WORKLOADS.add
def index_select_bwd(device: str) -> Step:
    table = leaf(65536, 2048, device=device)
    ids = torch.randint(0, 65536, (32768,), device=device)

    def step() -> None:
        drop_gradients(table)
        table.index_select(0, ids).sum().backward()

    return step


@WORKLOADS.add
def fancy_index_bwd(device: str) -> Step:
    table = leaf(65536, 2048, device=device)
    ids = torch.randint(0, 65536, (32768,), device=device)

    def step() -> None:
        drop_gradients(table)
        table[ids].sum().backward()

    return step


@WORKLOADS.add
def gather_bwd(device: str) -> Step:
    x = leaf(16384, 16384, device=device)
    columns = torch.randint(0, 16384, (16384, 64), device=device)

    def step() -> None:
        drop_gradients(x)
        x.gather(1, columns).sum().backward()

    return step


@WORKLOADS.add
def topk_bwd(device: str) -> Step:
    x = leaf(8192, 32768, device=device)

    def step() -> None:
        drop_gradients(x)
        x.topk(64, -1)[0].sum().backward()

    return step
