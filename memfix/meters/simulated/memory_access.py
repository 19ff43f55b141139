"""The addresses that Python code sees of simulated tensors, and the deep copies that it makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .patches import Patch
from .tracking import StorageTracker

_ADDRESS_SHIFT = 16
"""Addresses are those of the storages' own C++ objects, moved apart so that few storages seem to overlap."""


def patches(tracker: StorageTracker) -> list[Patch]:
    of_tensor, of_storage = torch.Tensor.data_ptr, torch.UntypedStorage.data_ptr
    copied: Callable[..., Any] = torch.Tensor.__deepcopy__

    def address(tensor: torch.Tensor) -> int:
        if not isinstance(tensor, FakeTensor):
            return of_tensor(tensor)
        start = _address(tensor.untyped_storage())
        return start and start + int(tensor.storage_offset()) * tensor.element_size()

    def address_of_storage(storage: torch.UntypedStorage) -> int:
        return _address(storage) if storage.device.type == "meta" else of_storage(storage)

    def deepcopy(tensor: torch.Tensor, memo: dict[Any, Any]) -> Any:
        if type(tensor) is not FakeTensor or not tensor.is_leaf or tensor.is_conj() or tensor.is_neg():
            return copied(tensor, memo)
        if id(tensor) not in memo:
            with torch.no_grad():
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                memo[id(tensor)] = _copied_parameter(tensor) if is_parameter else _copied(tracker, tensor, memo)
        return memo[id(tensor)]

    return [
        (torch.Tensor, "data_ptr", address),
        (torch.UntypedStorage, "data_ptr", address_of_storage),
        (torch.Tensor, "__deepcopy__", deepcopy),
    ]


def _address(storage: torch.UntypedStorage) -> int:
    return storage._cdata << _ADDRESS_SHIFT if storage.nbytes() else 0


def _copied_parameter(tensor: FakeTensor) -> torch.Tensor:
    """What ``nn.Parameter.__deepcopy__`` returns, which a fake parameter does not inherit: a copy without gradient."""
    return torch.nn.Parameter(tensor.data.clone(memory_format=torch.preserve_format), tensor.requires_grad)


def _copied(tracker: StorageTracker, tensor: FakeTensor, memo: dict[Any, Any]) -> torch.Tensor:
    """What ``Tensor.__deepcopy__`` returns for a tensor that has memory: it copies the whole storage, once for all
    tensors that share it, beside which a new tensor of one element is alive."""
    storage, size = tensor.untyped_storage(), tensor.element_size()
    storages = memo.setdefault("torch", {})
    if storage._cdata not in storages:
        num_elements = storage.nbytes() // size
        whole = tracker.cache.same_memory(tensor, (num_elements,), (1,), 0, tensor.dtype, tensor.fake_device)
        storages[storage._cdata] = whole.clone()
    held = tensor.new_empty([])
    made = tracker.cache.same_memory(
        storages[storage._cdata], tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.dtype,
        tensor.fake_device,
    )  # fmt: skip
    del held
    made.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        made.grad = tensor.grad.__deepcopy__(memo)
    its_own = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
    vars(made).update(copy.deepcopy(its_own, memo))
    return made
