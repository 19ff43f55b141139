"""Inputs that a form keeps for backward. They cost nothing in a check, whose caller keeps them too. In a model they are
activations that nobody else needs, and keeping one doubles what a layer holds.

So a small call is made by a caller that drops its inputs: a form keeps those whose memory is still in use.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..meters import get_meter
from ..meters.base import Reading, Step
from ..meters.timeline import Allocation
from .form_call import FormCall


def saved_reading(call: FormCall, like: Reading) -> Reading:
    """A reading of the inputs that a form keeps for backward. Meter, device and all else are those of ``like``."""
    case, saved = call.draw.case, saved_inputs(call)
    rows = []
    for spec in call.contract.inputs:
        if spec.name in saved:
            size = math.prod(spec.size(case.dims)) * getattr(torch, spec.dtype_at(case)).itemsize
            rows.append(Allocation(size, f"input {spec.name}", place=""))
    total = sum(row.bytes for row in rows)
    return replace(
        like, peak_bytes=total, held_bytes=total, leaked_bytes=0, allocated_bytes=total,
        alive_at_peak=tuple(sorted(rows, key=lambda row: -row.bytes)), kept=(), stages=(), timeline=None,
    )  # fmt: skip


_SAVED: dict[tuple[object, ...], list[str]] = {}


def saved_inputs(call: FormCall) -> list[str]:
    """Inputs whose memory is in use when the forward has ended and the caller has dropped them. Cached: most cases of a
    form are alike when they are shortened."""
    small = call.shortened()
    contract = call.contract
    key = (contract.name, contract.function(call.form), tuple(contract.inputs), small.draw.spelled())
    if key not in _SAVED:
        _SAVED[key] = _measured(small)
    return _SAVED[key]


def _measured(small: FormCall) -> list[str]:
    found: list[str] = []

    def build(device: str) -> Step:
        leaves = small.inputs(device, values=False)

        def step() -> object:
            # made by an operator: the graph always holds a leaf, whose gradient it will leave there
            tensors = {name: leaf * 1 if leaf.requires_grad else leaf for name, leaf in leaves.items()}
            leaves.clear()
            storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
            result = small.result(tensors)
            tensors.clear()
            found.extend(name for name, storage in storages.items() if torch._C._storage_Use_Count(storage._cdata) > 1)
            return result

        return step

    get_meter("simulated").measure(build, warmup=0)
    return found
