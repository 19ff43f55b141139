"""Sorts, of one long row and of many short ones: each takes another kernel."""

from __future__ import annotations

import torch

from memfix.meters.base import Step, StepBuilder

from .registry import MIB, Workloads, normal


def _sorted(*size: int) -> StepBuilder:
    def build(device: str) -> Step:
        x = normal(*size, device=device, dtype=torch.float32)
        return lambda: x.sort(-1)

    return build


WORKLOADS = Workloads(
    sort_1d=_sorted(32 * MIB),
    sort_rows_small=_sorted(16384, 2048),
    sort_rows_mid=_sorted(64, 262_144),
    sort_rows_many=_sorted(1024, 16384),
)
