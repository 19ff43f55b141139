"""Gives modules that existed before a simulation their weights back, which the step moved to the simulated GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .patches import applied

_TENSORS_OF_A_MODULE = ("_parameters", "_buffers", "_flat_weights")  # the last is a list of recurrent layers


@contextlib.contextmanager
def weights_restored() -> Iterator[None]:
    """Undo ``module.to(device)``, ``.cuda()``, ``.half()`` and their like on exit, where the weights were real."""
    apply = torch.nn.Module._apply
    undo: dict[int, Callable[[], None]] = {}

    def remembering(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if id(module) not in undo and _is_real(module):
            undo[id(module)] = _undo(module)
        return apply(module, *args, **kwargs)

    try:
        with applied([(torch.nn.Module, "_apply", remembering)]):
            yield
    finally:
        for restore in undo.values():
            restore()


def _is_real(module: torch.nn.Module) -> bool:
    tensors = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and not isinstance(tensor, FakeTensor) for tensor in tensors)


def _undo(module: torch.nn.Module) -> Callable[[], None]:
    """A function that puts the tensors back which a module has now. They are replaced, never changed."""
    holders = {name: module.__dict__[name] for name in _TENSORS_OF_A_MODULE if name in module.__dict__}
    contents = {name: holder.copy() for name, holder in holders.items()}

    def undo() -> None:
        for name, holder in holders.items():
            holder.clear()
            (holder.update if isinstance(holder, dict) else holder.extend)(contents[name])
            module.__dict__[name] = holder

    return undo
