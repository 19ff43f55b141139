"""The words of a workspace rule: the call it is asked about, what it answers, and where rules are kept."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..gpus import GPU


class NoRule(Exception):
    """The bytes that this call hides are not known; the message says of what."""


class Call:
    """One operator call on ``gpu``. ``call["dim"]`` is an argument by its schema name, the default where left out."""

    def __init__(
        self, gpu: GPU, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        self.gpu = gpu
        self.operator = operator
        self.args, self.kwargs = args, kwargs
        self.outputs = outputs
        """What the operator returned, before any workspace is counted."""

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        if not self.has(name):  # renamed in a torch that is newer than the rule
            raise NoRule(f"{self.operator} has no argument {name!r} in torch {torch.__version__}")
        position, default = _parameters(self.operator)[name]
        return self.args[position] if position < len(self.args) else default

    def has(self, name: str) -> bool:
        """Does this overload take such an argument?"""
        return name in _parameters(self.operator)


@functools.cache
def _parameters(operator: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    """Schema name -> its position and its default."""
    arguments = operator._schema.arguments
    return {argument.name: (position, argument.default_value) for position, argument in enumerate(arguments)}


Rule = Callable[[Call], list[int]]
"""The sizes in bytes of the buffers alive at the kernel's worst moment besides its results. Raises ``NoRule``."""

RULES: dict[torch._ops.OpOverloadPacket, Rule] = {}
NONE_NEEDED: set[torch._ops.OpOverloadPacket] = set()
"""Kernels that write their results directly. Pointwise operators and views need no entry."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten operators by name; a torch that lacks one of them is no error."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(_packets(names), function))
        return function

    return register


NO_KERNEL: set[torch._ops.OpOverloadPacket] = set()
"""Operators that run nothing on the GPU, so that there is nothing to measure."""

STORAGES: dict[torch._ops.OpOverloadPacket, Callable[[Call], int]] = {}
"""Kernels that leave their result in more memory than its shape needs: how many bytes."""


def storage(*names: str) -> Callable[[Callable[[Call], int]], Callable[[Call], int]]:
    """Register the size of the memory that an operator's one result lies in."""

    def register(function: Callable[[Call], int]) -> Callable[[Call], int]:
        STORAGES.update(dict.fromkeys(_packets(names), function))
        return function

    return register


def none_needed(names: str) -> None:
    """Say that these aten operators, separated by blanks, hide nothing."""
    NONE_NEEDED.update(_packets(names.split()))


def no_kernel(names: str) -> None:
    """Say that these aten operators, separated by blanks, run nothing on the GPU."""
    NO_KERNEL.update(_packets(names.split()))


def _packets(names: Any) -> list[torch._ops.OpOverloadPacket]:
    return [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]


def tensors_in(values: Any) -> list[torch.Tensor]:
    """The tensors of an operator's arguments or results, lists included."""
    if isinstance(values, torch.Tensor):
        return [values]
    found: list[torch.Tensor] = []
    if isinstance(values, (list, tuple)):
        for value in values:
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += tensors_in(value)
    return found


# ---------------------------------------------------------------- what many rules ask
def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copies_unless_contiguous(*tensors: torch.Tensor | None) -> list[int]:
    """What ``.contiguous()`` takes, tensor by tensor."""
    return [size_of(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def worst_moment(*moments: list[int]) -> list[int]:
    """Of several moments within one kernel call, the buffers of the one that takes the most."""
    return max(moments, key=sum)


def before_results(buffers: list[int], result_bytes: int) -> list[int]:
    """Buffers that are gone before the results are made: what they take beyond the results' own bytes."""
    return [max(0, sum(buffers) - result_bytes)]
