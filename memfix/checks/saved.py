"""Inputs that a form keeps for backward. They cost nothing in a check, whose caller keeps them too. In a model they are
activations that nobody else needs, and keeping one doubles what a layer holds.

So a small call is made by a caller that drops its inputs: a form keeps those whose memory is still in use.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..contract import Case, Contract
from ..meters import get_meter
from ..meters.base import Reading, Step
from ..meters.timeline import Allocation
from .form_call import FormCall
from .inputs import Draw


def of_what_is_saved(contract: Contract, form: str, draw: Draw, like: Reading) -> Reading:
    """The inputs that a form keeps for backward, as a reading of its own with the surroundings of ``like``."""
    by_name = {spec.name: spec for spec in contract.inputs}
    rows = []
    for name in saved_inputs(contract, form, draw):
        dtype = getattr(torch, by_name[name].dtype_at(draw.case))
        size = torch.Size(by_name[name].size(draw.case.dims)).numel() * dtype.itemsize
        rows.append(Allocation(size, f"input {name}", place=""))
    total = sum(row.bytes for row in rows)
    return replace(
        like, peak_bytes=total, held_bytes=total, leaked_bytes=0, allocated_bytes=total,
        alive_at_peak=tuple(sorted(rows, key=lambda row: -row.bytes)), kept=(), stages=(), timeline=None,
    )  # fmt: skip


def saved_inputs(contract: Contract, form: str, draw: Draw) -> list[str]:
    """Inputs whose memory is in use when the forward has ended and the caller has dropped them."""
    call = FormCall(contract, form, replace(draw, case=short_case(contract, draw.case)))
    found: list[str] = []

    def build(device: str) -> Step:
        leaves = call.inputs(device, values=False)

        def step() -> object:
            # made by an operator: the graph always holds a leaf, whose gradient it will leave there
            tensors = {name: leaf * 1 if leaf.requires_grad else leaf for name, leaf in leaves.items()}
            leaves.clear()
            storages = {name: tensor.untyped_storage() for name, tensor in tensors.items()}
            result = call.result(tensors)
            tensors.clear()
            found.extend(name for name, storage in storages.items() if torch._C._storage_Use_Count(storage._cdata) > 1)
            return result

        return step

    get_meter("simulated").measure(build, warmup=0)
    return found


def short_case(contract: Contract, case: Case) -> Case:
    """The case with shorter axes: a few chunks of two."""
    axes = contract.shape_dims()

    def short(dim: str) -> int:
        spec = contract.dims[dim]
        wanted = max(1, spec.low) * (4 if dim in axes else 2)
        return -(-wanted // spec.multiple_of) * spec.multiple_of

    return replace(case, dims={dim: min(size, short(dim)) for dim, size in case.dims.items()})
