"""Kernel workspace: the bytes that a CUDA kernel takes and gives back, which no dispatcher shows.

Each rule states how torch's own kernel allocates, in a file for its family. What no rule derives may have been measured
on the GPU (``tables``). An operator with neither is reported by name, and the reading says that it is an estimate;
so it does where a rule was never held against this GPU.
"""

from __future__ import annotations

import functools

import torch

from ..gpus import GPU
from ..tables import table_of
from . import (  # noqa: F401  each registers its rules
    activating,
    attending,
    batch_norm,
    convolving,
    creating,
    embedding,
    foreach,
    indexing,
    losses,
    moving,
    normalizing,
    ordering,
    pooling,
    products,
    recurrent,
    reducing,
    sampling,
    scanning,
    softmax,
    transforms,
)
from .rules import NO_KERNEL, NONE_NEEDED, RULES, STORAGES, Call, NoRule
from .signature import signature

__all__ = ["Call", "NoRule", "Workspace", "hidden_buffers", "storage_bytes"]


class Workspace:
    """What the kernels of one GPU take, and how sure that is."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self._table = table_of(gpu)
        self._doubts: dict[torch._ops.OpOverload, str | None] = {}

    def buffers(self, call: Call) -> tuple[list[int], str | None]:
        """Sizes in bytes, and why they are not to be called exact (None: they are)."""
        operator = call.operator
        try:
            sizes = hidden_buffers(call)
        except NoRule as unknown:
            known = self._table.measured if self._table else {}
            measured = known.get(signature(operator, call.args, call.kwargs))
            return ([], str(unknown)) if measured is None else ([measured] if measured else [], None)
        if operator not in self._doubts:
            self._doubts[operator] = None if _hides_nothing(operator) else self._doubt(operator)
        return sizes, self._doubts[operator]

    def _doubt(self, operator: torch._ops.OpOverload) -> str | None:
        if self._table is None:
            return f"no rule was measured on {self.gpu.name}: its kernels are assumed to take what they do elsewhere"
        return self._table.doubt(operator)


def hidden_buffers(call: Call) -> list[int]:
    """What the CUDA kernel behind ``call`` takes besides its outputs. Raises ``NoRule`` where unknown."""
    packet = call.operator.overloadpacket
    rule = RULES.get(packet)
    if rule is not None:
        return [size for size in rule(call) if size]
    if packet in NONE_NEEDED or _hides_nothing(call.operator):
        return []
    raise NoRule(f"no workspace rule for {call.operator}")


def storage_bytes(call: Call) -> int | None:
    """The memory that a CUDA kernel's result lies in, where that is more than its shape needs."""
    rule = STORAGES.get(call.operator.overloadpacket)
    return None if rule is None else rule(call)


@functools.cache
def _hides_nothing(operator: torch._ops.OpOverload) -> bool:
    """Views have no kernel; that of a pointwise operator, or of its twin in place, writes its result directly."""
    packet = operator.overloadpacket
    if packet in NO_KERNEL:
        return True
    if packet in RULES:
        return False
    twin = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
    overloads = [operator, *(getattr(twin, name) for name in twin.overloads() if twin not in RULES)]
    return operator.is_view or any(torch.Tag.pointwise in overload.tags for overload in overloads)
