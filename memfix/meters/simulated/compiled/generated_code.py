"""Stubs, for fake tensors, of the functions that Inductor's generated wrapper code calls on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..fake_result_cache import Size
from ..kernel_writes import written_by_source
from ..tracking import StorageTracker

_ALIGNMENT = 16  # bytes; Inductor copies inputs that are not aligned to it


class Kernel:
    """A stub for a Triton kernel that Inductor generated. A launch allocates nothing and does not run."""

    def __init__(self, name: str, source: str, tracker: StorageTracker) -> None:
        self.name = name
        self._written = written_by_source(source)
        self._values = tracker.values

    def run(self, *args: Any, **kwargs: Any) -> None:
        self._values.forget_written(self._written(args))


def empty_strided(size: Size, stride: Size, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda:0")


def empty_strided_cpu(tracker: StorageTracker) -> Callable[..., torch.Tensor]:
    def empty(size: Size, stride: Size, dtype: torch.dtype) -> torch.Tensor:
        """Make a fake tensor, because the C++ code that Inductor generates for the CPU does not run."""
        return tracker.cache.new_memory(size, stride, dtype, torch.device("cpu"))

    return empty


def reinterpret_tensor(tracker: StorageTracker) -> Callable[..., torch.Tensor]:
    def reinterpret(tensor: torch.Tensor, size: Size, stride: Size, offset_increment: int = 0) -> torch.Tensor:
        """Return a view of the tensor's storage, without the dispatcher, as Inductor's function does."""
        offset = tensor.storage_offset() + offset_increment
        if tensor.device.type != "cuda":
            return tensor.as_strided(size, stride, offset)
        tracker.storages.add_argument(tensor)
        return tracker.cache.same_memory(tensor, size, stride, offset, tensor.dtype, tensor.device)

    return reinterpret


def copy_if_misaligned(given: torch.Tensor) -> torch.Tensor:
    """Copy a misaligned input, like the C++ function of this name, but by its offset: every fake storage is aligned."""
    from torch._inductor.utils import clone_preserve_strides

    if int(given.storage_offset()) * given.element_size() % _ALIGNMENT == 0:
        return given
    return clone_preserve_strides(given)


def copy_misaligned_inputs(inputs: list[Any], indices: Sequence[int], return_pairs: Any = None) -> tuple[Any, Any]:
    """Copy misaligned inputs, like Inductor's function of this name."""
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in indices:
        given, inputs[index] = inputs[index], copy_if_misaligned(inputs[index])
        if inputs[index] is not given and return_pairs is not None and index in return_pairs:
            pairs.append((given, inputs[index]))
    return [old for old, _ in pairs], [new for _, new in pairs]
