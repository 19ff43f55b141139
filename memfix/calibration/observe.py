"""Measure the hidden bytes of real operators on a GPU and compare them with the workspace rules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..meters.simulated.composite import composite_key
from ..meters.simulated.gpus import GPU
from ..meters.simulated.workspace import Call, NoRule, hidden_buffers, storage_bytes
from ..meters.simulated.workspace.indexing import is_mask
from ..meters.simulated.workspace.layout import extent
from ..meters.simulated.workspace.rules import tensors_in
from ..meters.simulated.workspace.signature import signature


@dataclass(frozen=True)
class Observation:
    """A call's hidden bytes and the bytes that its results keep, measured and predicted.

    ``predicted`` is None if no rule covers the call; ``reason`` says why.
    """

    operator: str
    signature: str
    measured: int
    predicted: int | None
    kept: int
    predicted_kept: int
    reason: str = ""
    depends_on_values: bool = False
    """Whether the hidden bytes depend on the values in the tensors, so that the signature does not determine them."""

    @property
    def is_mispredicted(self) -> bool:
        return self.kept != self.predicted_kept or (self.predicted is not None and self.predicted != self.measured)


class OperatorWatch(TorchDispatchMode):
    """Records every CUDA operator that runs inside, with composite operators decomposed as in the simulated meter."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.observations: dict[str, Observation] = {}  # by signature: a call that was seen is not measured again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        composite = composite_key(func)
        if composite is not None:
            with self:
                return func._op_dk(composite, *args, **kwargs)
        if func.namespace == "prim" or func.is_view:
            return func(*args, **kwargs)
        spelled = signature(func, args, kwargs)  # before the call, which may change its arguments
        by_value = _depends_on_values(func, args)
        if spelled in self.observations and not by_value:
            return func(*args, **kwargs)
        bytes_before = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in((args, [*kwargs.values()]))
        }
        result, hidden, grown = measured_call(lambda: func(*args, **kwargs))
        if any(t.is_cuda for t in tensors_in((args, list(kwargs.values()), result))):
            call = Call(self.gpu, func, args, kwargs, result)
            predicted, reason = _prediction(call)
            kept = max(0, grown), _predicted_kept(call, bytes_before)
            name = str(func.overloadpacket)
            if by_value:
                spelled += f" -> {[list(tensor.shape) for tensor in tensors_in(result)]}"
            self.observations[spelled] = Observation(name, spelled, hidden, predicted, *kept, reason, by_value)
        return result


def measured_call(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """Return the result of a run, its peak of hidden bytes, and by how much the allocated bytes grew."""
    before = _requested()["current"]
    torch.cuda.reset_peak_memory_stats()
    result = run()
    after = _requested()
    return result, after["peak"] - max(before, after["current"]), after["current"] - before


def _prediction(call: Call) -> tuple[int | None, str]:
    try:
        return sum(hidden_buffers(call)), ""
    except NoRule as unknown:
        return None, str(unknown)


def _predicted_kept(call: Call, bytes_before: dict[int, int]) -> int:
    """The bytes by which the results must enlarge storages, given the bytes of the arguments' storages."""
    enlarged = storage_bytes(call)
    if enlarged is not None:
        return enlarged
    results = {t.untyped_storage()._cdata: t for t in tensors_in(call.outputs) if t.is_cuda}
    needed = {storage: extent(tensor) * tensor.element_size() for storage, tensor in results.items()}
    return sum(max(0, size - bytes_before.get(storage, 0)) for storage, size in needed.items())


def _requested() -> dict[str, int]:
    return torch.cuda.memory.memory_stats_as_nested_dict()["requested_bytes"]["all"]


def _depends_on_values(operator: Any, args: Any) -> bool:
    """Whether an operator's buffers depend on values, such as the number of selected or distinct elements."""
    picks = any(map(is_mask, tensors_in(args[1:2])))
    writes_by_mask = picks and operator.overloadpacket in (torch.ops.aten.index_put, torch.ops.aten.index_put_)
    is_sorted = operator.overloadpacket is torch.ops.aten.isin
    return writes_by_mask or is_sorted or torch.Tag.dynamic_output_shape in operator.tags
