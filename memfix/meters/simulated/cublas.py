"""The workspaces that cuBLAS keeps for each stream of each thread: the thread of forward, and that of backward.

Those of the default stream exist before a step and are not counted, unless the step frees them, as a trainer may do at
its end. Then the next matrix product allocates them again. On another stream the first product allocates them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from .gpus import GPU
from .ledger import Entry, Ledger
from .running_phase import is_in_backward
from .streams import DEFAULT, Streams

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.vdot}
_HOPPER_BYTES, _OTHER_BYTES = 32 << 20, (2 * 4096 + 8 * 16) << 10
_LT_BYTES = 1 << 20  # the workspace of cuBLASLt, which runs an addmm with a bias vector

_BACKWARD = "a product on a stream of its own: its backward runs on that stream too, with workspaces of its own"


class CublasWorkspaces:
    def __init__(self, gpu: GPU, ledger: Ledger, streams: Streams, note: Callable[[str], None]) -> None:
        self._ledger = ledger
        self._streams = streams
        self._note = note
        self._bytes = _HOPPER_BYTES if gpu.capability[0] == 9 else _OTHER_BYTES
        self._kept: dict[tuple[Hashable, str, bool], Entry] = {}
        self._were_given_back = False

    def give_back(self) -> None:
        """Free all workspaces: the stub for ``torch._C._cuda_clearCublasWorkspaces``."""
        for entry in self._kept.values():
            self._ledger.death(entry)
        self._kept.clear()
        self._were_given_back = True

    def take(self, func: Any, args: Any) -> None:
        """Before an operator runs, count the workspaces that it allocates for its thread and stream."""
        is_missing = self._were_given_back or self._streams.current is not DEFAULT
        if not is_missing or func.overloadpacket not in _PRODUCTS:
            return
        thread = "backward" if is_in_backward() else "forward"
        is_new = self._take(thread, self._bytes, of_lt=False)
        is_differentiated = torch.is_grad_enabled() and any(map(_wants_gradient, args))
        if is_new and is_differentiated and self._streams.current is not DEFAULT:
            self._note(_BACKWARD)
        if func.overloadpacket is aten.addmm and args[0].dim() == 1:
            self._take(thread, _LT_BYTES, of_lt=True)

    def _take(self, thread: str, size: int, *, of_lt: bool) -> bool:
        """Count a workspace, and return whether it is new."""
        key = self._streams.current, thread, of_lt
        if key in self._kept:
            return False
        entry = self._kept[key] = Entry(size, "workspace that cuBLAS keeps", None)
        self._ledger.birth(entry)
        return True


def _wants_gradient(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.requires_grad
