"""Follows every storage on the fake device, from the operator that made it until its memory is freed."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from .composite import composite_key
from .engine import EngineWatch
from .gpus import GPU
from .ledger import Entry, Ledger
from .source_lines import SourceLines
from .workspace import NoRule, hidden_buffers


class StorageTracker(TorchDispatchMode):
    """A dispatch mode above FakeTensorMode that keeps the ledger."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.ledger = Ledger()
        self.engine = EngineWatch()
        self.lines = SourceLines()
        self.notes: dict[str, None] = {}  # in order of first mention
        self._entries: dict[int, tuple[Entry, Any]] = {}  # storage address -> its entry and a weak reference

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # asks for a device or a stride: nothing happens
            return func(*args, **kwargs)
        self.ledger.settle()
        in_place = self.engine.writes_in_place(func, args)
        composite = None if in_place else composite_key(func)
        if composite is not None:
            with self:  # so that each part is seen
                result = func._op_dk(composite, *args, **kwargs)
            if all(isinstance(tensor, FakeTensor) for tensor in _tensors(result)):
                return result
            # the composite bypassed the dispatcher and only made a view: the operator itself knows the device
        for tensor in _tensors((args, list(kwargs.values()))):
            self._register_found(tensor)
        site = self.lines.current()
        result = func(*args, **kwargs)
        overwritten = self._entry(args[0]) if in_place else None
        for tensor in _tensors(result):
            self._register_result(tensor, str(func), site, overwritten)
        self._register_workspace(func, args, kwargs, site)
        return result

    # ---------------------------------------------------------------- storages
    def _register_found(self, tensor: torch.Tensor) -> None:
        if self._is_followed(tensor) and self._entry(tensor) is None:
            storage = tensor.untyped_storage()
            entry = Entry(storage.nbytes(), "existed before")
            self._follow(storage, entry)
            self.ledger.found(entry)

    def _register_result(self, tensor: torch.Tensor, what: str, site: object, overwritten: Entry | None) -> None:
        if not self._is_followed(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._entry(tensor)
        if known is not None:
            if known.bytes != storage.nbytes():
                self.ledger.resize(known, storage.nbytes())
            return
        entry = Entry(storage.nbytes(), what, site, in_backward=_in_backward())
        self._follow(storage, entry)
        if overwritten is not None:
            self.ledger.birth_in_place_of(overwritten, entry)
        else:
            self.ledger.birth(entry)

    def _register_workspace(self, func: Any, args: Any, kwargs: Any, site: object) -> None:
        if not any(self._is_followed(tensor) for tensor in _tensors(args)):
            return
        try:
            buffers = hidden_buffers(self.gpu, func, args, kwargs)
        except NoRule as unknown:
            self.notes.setdefault(str(unknown))
            return
        if buffers:
            what = f"workspace of {func}"
            self.ledger.workspace(Entry(size, what, site, in_backward=_in_backward()) for size in buffers)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """``storage.resize_`` does not pass the dispatcher; whoever intercepts it tells us."""
        found = self._entries.get(storage._cdata)
        if found is not None:
            self.ledger.resize(found[0], storage.nbytes())

    def _is_followed(self, tensor: torch.Tensor) -> bool:
        # a fake tensor's own record of its device, since asking for .device passes the dispatcher again
        device = getattr(tensor, "fake_device", None) or tensor.device
        return device.type == "cuda" and tensor.layout is torch.strided

    def _entry(self, tensor: torch.Tensor) -> Entry | None:
        found = self._entries.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def _follow(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        address = storage._cdata

        def freed(_reference: object) -> None:
            found = self._entries.get(address)
            if found is not None and found[0] is entry:
                del self._entries[address]
            self.ledger.death(entry)

        self._entries[address] = (entry, weakref.ref(storage, freed))


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors of an operator's arguments or results, lists included."""
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _tensors(value)
