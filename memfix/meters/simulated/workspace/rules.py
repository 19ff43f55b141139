"""The interface of workspace rules: the call that a rule gets, the buffers that it returns, and the registry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..gpus import GPU


class NoRule(Exception):
    """The hidden bytes of a call are unknown; the message describes the call."""


@dataclass(frozen=True)
class Range:
    """A number of bytes that is known only by its bounds and its usual value."""

    least: int
    usual: int
    most: int

    @classmethod
    def of(cls, exactly: int) -> Range:
        return cls(exactly, exactly, exactly)

    @property
    def is_exact(self) -> bool:
        return self.least == self.usual == self.most

    def __add__(self, size: int) -> Range:
        return Range(self.least + size, self.usual + size, self.most + size)

    def __or__(self, other: Range) -> Range:
        """The larger of two amounts."""
        return Range(max(self.least, other.least), max(self.usual, other.usual), max(self.most, other.most))


class Estimated(NoRule):
    """The hidden bytes of a call lie within ``bytes``; the message says why no more is known."""

    def __init__(self, why: str, bytes: Range) -> None:
        super().__init__(why)
        self.bytes = bytes


class Call:
    """One operator call on ``gpu``. ``call["dim"]`` is the argument of that schema name, or its default."""

    def __init__(
        self, gpu: GPU, operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any
    ) -> None:
        self.gpu = gpu
        self.operator = operator
        self.args, self.kwargs = args, kwargs
        self.outputs = outputs
        """The operator's results."""

    def __getitem__(self, name: str) -> Any:
        if name in self.kwargs:
            return self.kwargs[name]
        if not self.has(name):  # a newer torch has renamed the argument
            raise NoRule(f"{self.operator} has no argument {name!r} in torch {torch.__version__}")
        position, default = _parameters(self.operator)[name]
        return self.args[position] if position < len(self.args) else default

    def on(self, gpu: GPU) -> Call:
        """The same call on another GPU."""
        return Call(gpu, self.operator, self.args, self.kwargs, self.outputs)

    def has(self, name: str) -> bool:
        """Whether this overload has an argument called ``name``."""
        return name in _parameters(self.operator)


@functools.cache
def _parameters(operator: torch._ops.OpOverload) -> dict[str, tuple[int, Any]]:
    """Schema name of each argument -> its position and its default."""
    arguments = operator._schema.arguments
    return {argument.name: (position, argument.default_value) for position, argument in enumerate(arguments)}


Rule = Callable[[Call], list[int]]
"""Returns the sizes in bytes of the buffers that a kernel has at its peak besides its results, or raises ``NoRule``."""

RULES: dict[torch._ops.OpOverloadPacket, Rule] = {}
NONE_NEEDED: set[torch._ops.OpOverloadPacket] = set()
"""Kernels that write their results directly. Pointwise operators and views need no entry."""


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for aten operators by name. Operators that this torch lacks are skipped."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(_packets(names), function))
        return function

    return register


FOREIGN_RULES: dict[str, Rule] = {}
"""The rules of other packages' operators, by name: the packages may be imported later, or never."""


def foreign_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators of other packages, such as ``torchvision.roi_align``."""

    def register(function: Rule) -> Rule:
        FOREIGN_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def unknown(why: str, *names: str) -> Rule:
    """Register aten operators with unknown workspace. ``why`` may contain ``{operator}`` or ``{name}``."""

    @rule(*names)
    def refuse(call: Call) -> list[int]:
        raise NoRule(why.format(operator=call.operator, name=call.operator.overloadpacket.__name__))

    return refuse


NO_KERNEL: set[torch._ops.OpOverloadPacket] = set()
"""Operators that run no kernel on the GPU, so there is nothing to measure."""

STORAGES: dict[torch._ops.OpOverloadPacket, Callable[[Call], int]] = {}
"""Operators whose result has a larger storage than its shape needs -> the bytes of the storage."""


def storage(*names: str) -> Callable[[Callable[[Call], int]], Callable[[Call], int]]:
    """Register the size of the storage of an operator's single result."""

    def register(function: Callable[[Call], int]) -> Callable[[Call], int]:
        STORAGES.update(dict.fromkeys(_packets(names), function))
        return function

    return register


def none_needed(names: str) -> None:
    """Register aten operators, separated by blanks, that need no workspace."""
    NONE_NEEDED.update(_packets(names.split()))


def no_kernel(names: str) -> None:
    """Register aten operators, separated by blanks, that run no kernel on the GPU."""
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
            if isinstance(value, torch.Tensor):  # without a call per tensor, since every operator pays for it
                found.append(value)
            elif isinstance(value, (list, tuple)):
                found += tensors_in(value)
    return found


# ---------------------------------------------------------------- shared by many rules
def size_of(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def copies_unless_contiguous(*tensors: torch.Tensor | None) -> list[int]:
    """The bytes of the copies that ``.contiguous()`` makes of each tensor."""
    return [size_of(tensor) for tensor in tensors if tensor is not None and not tensor.is_contiguous()]


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def last_power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def worst_moment(*moments: list[int]) -> list[int]:
    """Return the list with the most bytes. Each list has the buffers that are alive at one moment of a call."""
    return max(moments, key=sum)


def before_results(buffers: list[int], result_bytes: int) -> list[int]:
    """The bytes by which buffers exceed the results, if the buffers are freed before the results are allocated."""
    return [max(0, sum(buffers) - result_bytes)]
