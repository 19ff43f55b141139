"""The storages on the simulated GPU: each has an entry in the ledger from its first use until its memory is freed."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ...errors import ON_A_GPU, MeasurementError
from ..timeline import Allocation
from .ledger import Entry, Ledger


class Storages:
    def __init__(self, ledger: Ledger, fake_mode: FakeTensorMode) -> None:
        self._ledger = ledger
        self._fake_mode = fake_mode
        self._entries: dict[int, tuple[Entry, Any]] = {}  # storage address -> its entry and a weak reference
        self.counts_as_inputs = False
        """While True, new storages count as if they had existed before the step."""
        self.of_earlier_simulations: list[Allocation] = []
        """Tensors from an earlier simulation that a cache in the user's code kept."""

    def entry_of(self, tensor: torch.Tensor) -> Entry | None:
        found = self._entries.get(tensor.untyped_storage()._cdata)
        return found[0] if found else None

    def add_argument(self, tensor: torch.Tensor) -> None:
        """Register an operator's argument. A storage that is first seen here existed before the step."""
        if tensor.layout is not torch.strided:
            if tensor.layout in _COMPRESSED:  # FakeTensorMode makes no fake of a real one
                _refuse_sparse(tensor)
            return
        if self.entry_of(tensor) is None and is_on_gpu(tensor):
            storage = tensor.untyped_storage()
            entry = Entry(storage.nbytes(), "existed before")
            self._follow(storage, entry)
            self._ledger.add_existing(entry)
            if getattr(tensor, "fake_mode", self._fake_mode) is not self._fake_mode:
                self.of_earlier_simulations.append(Allocation(entry.bytes, "of an earlier simulation", ""))

    def add_result(
        self, tensor: torch.Tensor, operator: torch._ops.OpOverload, site: object, replaced: Entry | None
    ) -> None:
        """Register an operator's result: a new storage, a view of a known one, or a known one with a new size.

        ``replaced`` is the entry into whose memory the autograd engine would have written the result.
        """
        if not is_on_gpu(tensor):
            _refuse_sparse(tensor)
            return
        storage = tensor.untyped_storage()
        known = self._entries.get(storage._cdata)
        if known is not None:
            if known[0].bytes != storage.nbytes():
                self._ledger.resize(known[0], storage.nbytes())
            return
        if writes_into_arguments(operator):
            return  # the fake kernel returned a new tensor; on a GPU the result is the argument itself
        entry = Entry(storage.nbytes(), name_of(operator), site, self._ledger.phase)
        self._follow(storage, entry)
        if self.counts_as_inputs:
            self._ledger.add_existing(entry)
        elif replaced is not None:
            self._ledger.birth_in_place_of(replaced, entry)
        else:
            self._ledger.birth(entry)

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Record the new size after ``storage.resize_``, which does not reach the dispatcher."""
        found = self._entries.get(storage._cdata)
        if found is not None:
            self._ledger.resize(found[0], storage.nbytes())

    def _follow(self, storage: torch.UntypedStorage, entry: Entry) -> None:
        """Keep ``entry`` until the storage is freed."""
        address = storage._cdata

        def freed(_reference: object) -> None:
            found = self._entries.get(address)
            if found is not None and found[0] is entry:
                del self._entries[address]
            self._ledger.death(entry)

        self._entries[address] = (entry, weakref.ref(storage, freed))


def is_on_gpu(tensor: torch.Tensor) -> bool:
    """Whether the tensor is on the simulated GPU. Raises for a tensor on a second GPU."""
    # .device of a fake tensor would go through the dispatcher again
    device = getattr(tensor, "fake_device", None) or tensor.device
    if device.index:
        raise MeasurementError(f"one GPU is simulated, and the step uses {device}")
    return device.type == "cuda" and tensor.layout is torch.strided


@functools.cache
def name_of(operator: torch._ops.OpOverload) -> str:
    """The operator's name without ``aten``: ``mm``, ``add.Tensor``, ``mylib.op``."""
    return str(operator).removeprefix("aten.").removesuffix(".default")


_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def _refuse_sparse(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise MeasurementError(
            f"a tensor of layout {tensor.layout} holds memory that only its values decide; {ON_A_GPU}"
        )


@functools.cache
def writes_into_arguments(operator: torch._ops.OpOverload) -> bool:
    """Whether every result is one of the arguments, as for in-place operators and ``out=``."""
    schema = operator._schema
    named = schema.returns or [argument for argument in schema.arguments if argument.alias_info is not None]
    return bool(named) and all(one.alias_info is not None and one.alias_info.is_write for one in named)
