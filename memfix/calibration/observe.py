"""Watches real operators on a real GPU: the bytes each hides, beside what its rule says."""

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
    """One call: the bytes it hid and those that its results keep, and what is predicted of them.

    ``predicted`` is None where there is no rule, for a ``reason``.
    """

    operator: str
    signature: str
    measured: int
    predicted: int | None
    kept: int
    predicted_kept: int
    reason: str = ""
    depends_on_values: bool = False
    """Whether the values decide how large the results are: then the signature does not tell the hidden bytes."""

    @property
    def missed(self) -> bool:
        return self.kept != self.predicted_kept or (self.predicted is not None and self.predicted != self.measured)


class OperatorWatch(TorchDispatchMode):
    """Records every operator that runs on CUDA inside, whole operators as the simulated meter sees them."""

    def __init__(self, gpu: GPU) -> None:
        super().__init__()
        self.gpu = gpu
        self.observations: dict[str, Observation] = {}  # by signature: the same call twice says nothing new

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
        there = {
            t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in((args, [*kwargs.values()]))
        }
        result, hidden, grown = watched(lambda: func(*args, **kwargs))
        if any(t.is_cuda for t in tensors_in((args, list(kwargs.values()), result))):
            call = Call(self.gpu, func, args, kwargs, result)
            predicted, reason = _prediction(call)
            kept = max(0, grown), _predicted_kept(call, there)
            name = str(func.overloadpacket)
            if by_value:
                spelled += f" -> {[list(made.shape) for made in tensors_in(result)]}"
            self.observations[spelled] = Observation(name, spelled, hidden, predicted, *kept, reason, by_value)
        return result


def watched(run: Callable[[], Any]) -> tuple[Any, int, int]:
    """The result of a run, the bytes that it allocated and freed again, and by how much the allocated bytes grew."""
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


def _predicted_kept(call: Call, there: dict[int, int]) -> int:
    """What the results need by their shapes, beyond the memory that arguments had ``there`` before."""
    enlarged = storage_bytes(call)
    if enlarged is not None:
        return enlarged
    made = {t.untyped_storage()._cdata: t for t in tensors_in(call.outputs) if t.is_cuda}
    needed = {storage: extent(tensor) * tensor.element_size() for storage, tensor in made.items()}
    return sum(max(0, size - there.get(storage, 0)) for storage, size in needed.items())


def _requested() -> dict[str, int]:
    return torch.cuda.memory.memory_stats_as_nested_dict()["requested_bytes"]["all"]


def _depends_on_values(operator: Any, args: Any) -> bool:
    """Whether an operator's buffers depend on values: on how many are picked, or differ."""
    picks = any(map(is_mask, tensors_in(args[1:2])))
    writes_by_mask = picks and operator.overloadpacket in (torch.ops.aten.index_put, torch.ops.aten.index_put_)
    is_sorted = operator.overloadpacket is torch.ops.aten.isin
    return writes_by_mask or is_sorted or torch.Tag.dynamic_output_shape in operator.tags
