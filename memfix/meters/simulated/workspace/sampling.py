"""Random numbers: most are drawn in place; some distributions allocate their parameters first."""

from __future__ import annotations

import torch

from .reducing import extremum_buffers, sum_buffers
from .rules import Call, none_needed, rule, size_of

none_needed(
    """uniform_ normal_ random_ exponential_ geometric_ cauchy_ log_normal_ poisson binomial _standard_gamma
    _standard_gamma_grad _dirichlet_grad _fused_dropout _masked_scale"""
)


@rule("bernoulli", "bernoulli_")
def _bernoulli(call: Call) -> list[int]:
    """Probabilities are cast to float32, or to float64 for a float64 result."""
    drawn = call["self"]
    probabilities = call["p"] if call.has("p") else drawn
    if not isinstance(probabilities, torch.Tensor):
        return []
    dtype = torch.float64 if drawn.dtype == torch.float64 else torch.float32
    if probabilities.dtype == dtype and probabilities.device == drawn.device:
        return []
    return [probabilities.numel() * dtype.itemsize]


@rule("normal")
def _normal(call: Call) -> list[int]:
    if not call.has("mean") or isinstance(call["std"], float | int):
        # torch also allocates an unused tensor of the result's size
        return [size_of(call["mean"])] if call.has("mean") and isinstance(call["mean"], torch.Tensor) else []
    std = call["std"]
    item = std.element_size()
    # the smallest standard deviation is compared with zero
    searching = [item, *extremum_buffers(call.gpu, std)]
    return searching if sum(searching) > item else [item, 1]


@rule("_sample_dirichlet")
def _dirichlet(call: Call) -> list[int]:
    alpha = call["self"]
    drawn = torch.empty(alpha.shape, dtype=alpha.dtype, device="meta")
    total = size_of(drawn) // max(1, drawn.shape[-1])
    return [total, *sum_buffers(call.gpu, drawn, [-1], keepdim=True)]
