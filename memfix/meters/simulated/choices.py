"""The indices that operators such as ``topk`` choose by values, and what they are assumed to be."""

from __future__ import annotations

import math
from typing import Literal

import torch

from .workspace.rules import Call

aten = torch.ops.aten

How = Literal["even", "worst", "last"]
"""All indices in turn, always the first ones, or always the last ones."""

_PLACES = {
    **dict.fromkeys((aten.argmax.default, aten.argmin.default, aten.multinomial.default), 0),
    **dict.fromkeys((aten.topk.default, aten.sort.default, aten.sort.stable, aten.kthvalue.default), 1),
    **dict.fromkeys((aten.max.dim, aten.min.dim, aten.median.dim, aten.nanmedian.dim, aten.mode.default), 1),
}
"""Operators that choose along a dimension -> the place of the indices among their results."""


def chooses(operator: torch._ops.OpOverload) -> bool:
    return operator in _PLACES


def chosen_indices(call: Call) -> torch.Tensor:
    """Return the indices that an operator that ``chooses`` returned."""
    return call.outputs if isinstance(call.outputs, torch.Tensor) else call.outputs[_PLACES[call.operator]]


def assumed_indices(call: Call, how: How) -> torch.Tensor:
    """Return indices for an operator that ``chooses``. Those chosen from the same elements differ from each other."""
    given, indices = call.args[0], chosen_indices(call)
    dim = -1 if call.operator is aten.multinomial.default else call["dim"]
    num_choices = max(1, given.numel() if dim is None or not given.dim() else given.shape[dim])
    has_own_dim = indices.dim() > 0 and indices.dim() == given.dim() and dim is not None
    with torch._C._DisableTorchDispatch():
        shape = list(indices.shape) if has_own_dim else [*indices.shape, 1]
        place = dim if has_own_dim else -1
        shape[place], shape[-1] = shape[-1], shape[place]
        if how == "even":
            rows = torch.arange(math.prod(shape)).remainder(num_choices).reshape(shape)
        else:
            first = torch.arange(shape[-1])
            rows = (first if how == "worst" else num_choices - 1 - first).expand(shape)
        return rows.transpose(place, -1).reshape(indices.shape).contiguous()
