"""Reductions and scans over rows, columns and everything."""

from __future__ import annotations

from collections.abc import Callable

import torch

from memfix.meters.base import Step, StepBuilder

from .registry import MIB, Workloads, normal


def _reduced(
    reduce: Callable[[torch.Tensor], torch.Tensor],
    *,
    size: tuple[int, int] = (65536, 8192),
    dtype: torch.dtype = torch.bfloat16,
) -> StepBuilder:
    def build(device: str) -> Step:
        x = normal(*size, device=device, dtype=dtype)
        return lambda: reduce(x)

    return build


WORKLOADS = Workloads(
    sum_dim0=_reduced(lambda x: x.sum(0)),
    sum_dim1=_reduced(lambda x: x.sum(1)),
    sum_all=_reduced(lambda x: x.sum()),
    sum_skinny=_reduced(lambda x: x.sum(0), size=(4 * MIB, 64)),
    sum_bool_mask=_reduced(lambda x: (x > 0).sum()),
    mean_dim0_fp32=_reduced(lambda x: x.mean(0), size=(65536, 4096), dtype=torch.float32),
    argmax_dim0=_reduced(lambda x: x.argmax(0)),
    argmax_all=_reduced(lambda x: x.argmax()),
    var_dim0=_reduced(lambda x: x.var(0)),
    norm_all=_reduced(lambda x: x.norm()),
    logsumexp_dim1=_reduced(lambda x: x.logsumexp(1)),
    cumsum_dim1=_reduced(lambda x: x.cumsum(1)),
    cumsum_dim0=_reduced(lambda x: x.cumsum(0)),
)
