"""Kernel workspace: the hidden bytes that a CUDA kernel allocates and frees, which the dispatcher does not show.

Each file has the rules of one family of kernels; a rule states what torch's kernel allocates. For calls without a rule
the bytes may have been measured on the GPU (``tables``). If an operator has neither, or its rule was never checked on
this GPU, the reading names the operator and says that it is an estimate.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import pkgutil
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from ..gpus import GPU, H200
from ..hide_dispatch_modes import python_keys_shown
from ..tables import Table, table_of
from .filling import filled, is_filling, may_resize, note_of
from .rules import (
    FOREIGN_RULES,
    NO_KERNEL,
    NONE_NEEDED,
    RULES,
    STORAGES,
    Call,
    Estimated,
    NoRule,
    Range,
    tensors_in,
)
from .signature import signature

__all__ = [
    "Call",
    "Estimated",
    "Hidden",
    "NoRule",
    "Range",
    "Workspace",
    "hidden_buffers",
    "hides_nothing",
    "is_filling",
    "may_resize",
    "storage_bytes",
]

for _file in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_file.name}")  # each module registers its rules


class Hidden(NamedTuple):
    """The hidden buffers of a call."""

    sizes: list[int]
    doubt: str | None = None
    """Why the sizes may be inexact; None if they are exact."""
    within: Range | None = None
    """The bounds of their sum, if it is only estimated."""


class Workspace:
    """The hidden bytes of kernels on one GPU, and whether they are exact."""

    def __init__(self, gpu: GPU) -> None:
        self.gpu = gpu
        self._table = table_of(gpu)
        self._doubts: dict[torch._ops.OpOverload, str | None] = {}
        self._found: dict[Hashable, Hidden] = {}

    def buffers(self, call: Call, key: Hashable = None, given: Sequence[torch.Tensor] = ()) -> Hidden:
        """Return the hidden buffers of a call: by its rule, else as measured, else as estimated.

        Results are cached by ``key``. Calls with equal keys have equal arguments, except for the storages and offsets
        of the tensors ``given``.
        """
        if key is None or call.operator.overloadpacket not in RULES:  # without a rule there is nothing to compute
            return self._buffers(call)
        whole = key, *_places_in_memory(given), torch.get_deterministic_debug_mode()
        hidden = self._found.get(whole)
        if hidden is None:
            hidden = self._found[whole] = self._buffers(call)
        return hidden

    def _buffers(self, call: Call) -> Hidden:
        operator = call.operator
        try:
            sizes = hidden_buffers(call)
        except NoRule as unknown:
            measured = _measured(self._table, call)
            if measured is not None:
                return Hidden([measured] if measured else [])
            if isinstance(unknown, Estimated):
                return Hidden([unknown.bytes.usual], str(unknown), unknown.bytes)
            return Hidden([], str(unknown)) if self._table else self._as_on_h200(call, unknown)
        if operator not in self._doubts:
            self._doubts[operator] = None if hides_nothing(operator) else self._doubt(operator)
        doubt = self._doubts[operator]
        filling = filled(call)
        if filling.is_exact and not (sizes and filling.usual):
            sizes = [*sizes, *([filling.usual] if filling.usual else [])]
        elif doubt is None:  # beside what the rule says, or before that
            return Hidden(sizes, note_of(call), Range(sum(sizes), sum(sizes), sum(sizes) + filling.most))
        if self._table is not None or doubt is None:
            return Hidden(sizes, doubt)
        within = self._with_other_multiprocessors(call, sum(sizes))
        if not within.is_exact:
            bounds = f"half and twice the {self.gpu.multiprocessors} of {self.gpu.name}"
            doubt = f"workspace by the number of multiprocessors, bounded by {bounds}: {operator}"
        return Hidden(sizes, doubt, within)

    def _with_other_multiprocessors(self, call: Call, usual: int) -> Range:
        """The bytes that a rule gives, bounded by those for half and for twice as many multiprocessors."""
        totals = [usual]
        for number in (max(1, self.gpu.multiprocessors // 2), 2 * self.gpu.multiprocessors):
            with contextlib.suppress(NoRule):
                totals.append(sum(hidden_buffers(call.on(replace(self.gpu, multiprocessors=number)))))
        return Range(min(totals), usual, max(totals))

    def _as_on_h200(self, call: Call, unknown: NoRule) -> Hidden:
        """Estimate the buffers of a call whose rule does not cover this GPU by those on an H200."""
        size: int | None
        try:
            size = sum(hidden_buffers(call.on(H200)))
        except NoRule:
            size = _measured(table_of(H200), call)
        if size is None:
            return Hidden([], str(unknown))
        doubt = f"{unknown}: {call.operator} is assumed to take what it does on H200, bounded by none and twice that"
        return Hidden([size], doubt, Range(0, size, 2 * size))

    def _doubt(self, operator: torch._ops.OpOverload) -> str | None:
        if self._table is None:
            return f"no rule was measured on {self.gpu.name}: its kernels are assumed to take what they do elsewhere"
        return self._table.doubt(operator)


def _places_in_memory(tensors: Sequence[torch.Tensor]) -> tuple[Hashable, Hashable]:
    """The storage offset of each tensor, and the index of the first tensor that shares its storage."""
    first: dict[int, int] = {}
    storages = [first.setdefault(tensor.untyped_storage()._cdata, i) for i, tensor in enumerate(tensors)]
    return tuple([tensor.storage_offset() for tensor in tensors]), tuple(storages)


def _measured(table: Table | None, call: Call) -> int | None:
    """The hidden bytes of a call as measured on a table's GPU; None if there is no table or no measurement."""
    return table.measured.get(signature(call.operator, call.args, call.kwargs)) if table else None


def hidden_buffers(call: Call) -> list[int]:
    """The sizes of the buffers that the CUDA kernel allocates besides its outputs. Raises ``NoRule`` if unknown."""
    packet = call.operator.overloadpacket
    rule = RULES.get(packet) or (FOREIGN_RULES.get(str(packet)) if call.operator.namespace != "aten" else None)
    if rule is not None:
        tensors = tensors_in((call.args, [*call.kwargs.values()], call.outputs))
        with python_keys_shown(tensors):  # rules make views of them
            return [size for size in rule(call) if size]
    if packet in NONE_NEEDED or hides_nothing(call.operator):
        return []
    raise NoRule(f"no workspace rule for {call.operator}")


def storage_bytes(call: Call) -> int | None:
    """The bytes of a result's storage on CUDA; None if they follow from its shape."""
    rule = STORAGES.get(call.operator.overloadpacket)
    return None if rule is None else rule(call)


@functools.cache
def hides_nothing(operator: torch._ops.OpOverload) -> bool:
    """Whether the operator is a view, or a pointwise operator (in place or not), whose kernel needs no workspace."""
    packet = operator.overloadpacket
    if packet in NO_KERNEL:
        return True
    if packet in RULES:
        return False
    twin = getattr(torch.ops.aten, packet.__name__.removesuffix("_"), packet)
    overloads = [operator, *(getattr(twin, name) for name in twin.overloads() if twin not in RULES)]
    return operator.is_view or any(torch.Tag.pointwise in overload.tags for overload in overloads)
