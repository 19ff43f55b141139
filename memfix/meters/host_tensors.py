"""A dispatch mode that counts the storages of torch's CPU tensors, which tracemalloc does not see."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .simulated.source_lines import Site, SourceLines


class CpuTensors(TorchDispatchMode):
    """Calls ``on_change`` with the bytes of every storage that an operator makes, and with minus these bytes when the
    storage is freed. A storage first seen as an argument is not counted: numpy made it, or code before the step.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: the default imports the whole compiler at the first operator, which would be counted."""
        return False

    def __init__(self, on_change: Callable[[int], None]) -> None:
        super().__init__()
        self._num_made = 0
        self._on_change = on_change
        self._lines = SourceLines()
        self._alive: dict[int, tuple[int, Site | None, Any]] = {}  # address -> bytes, line, weak reference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _cpu_tensors_in((args, kwargs)):
            self._follow(tensor.untyped_storage(), 0, None)
        result = func(*args, **kwargs)
        for tensor in _cpu_tensors_in(result):
            storage = tensor.untyped_storage()
            self._follow(storage, storage.nbytes(), self._lines.current())
        return result

    def clear(self) -> int:
        """Drop the records, whose own memory would count as the step's. Returns how many storages were made."""
        self._alive, self._lines = {}, SourceLines()
        return self._num_made

    def alive(self) -> list[tuple[int, Site | None]]:
        """The bytes of each live storage that an operator made, and the line that made it."""
        return [(size, site) for size, site, _ in self._alive.values() if size]

    def _follow(self, storage: torch.UntypedStorage, size: int, site: Site | None) -> None:
        address = storage._cdata
        if address in self._alive:
            return

        def freed(_reference: object) -> None:
            if self._alive.pop(address, None) is not None and size:
                self._on_change(-size)

        self._alive[address] = (size, site, weakref.ref(storage, freed))
        if size:
            self._num_made += 1
            self._on_change(size)


def _cpu_tensors_in(values: Any) -> list[torch.Tensor]:
    """The CPU tensors in nested sequences and dictionaries. It runs twice per operator: ``tree_leaves`` is too slow."""
    found, to_visit = [], [values]
    while to_visit:
        value = to_visit.pop()
        if type(value) in (torch.Tensor, torch.nn.Parameter):
            if value.device.type == "cpu" and value.layout is torch.strided:
                found.append(value)
        elif isinstance(value, (tuple, list)):
            to_visit += value
        elif isinstance(value, dict):
            to_visit += value.values()
    return found
