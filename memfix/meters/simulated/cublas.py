"""The workspaces that cuBLAS keeps for each thread: the thread of forward, and that of backward.

They exist before a step and are not counted, unless the step frees them, as a trainer may do at its end. Then the next
matrix product allocates them again.
"""

from __future__ import annotations

from typing import Any

import torch

from .gpus import GPU
from .ledger import Entry, Ledger
from .running_phase import is_in_backward

aten = torch.ops.aten
_PRODUCTS = {aten.mm, aten.addmm, aten.bmm, aten.baddbmm, aten.mv, aten.addmv, aten.dot, aten.vdot}
_HOPPER_BYTES, _OTHER_BYTES = 32 << 20, (2 * 4096 + 8 * 16) << 10
_LT_BYTES = 1 << 20  # the workspace of cuBLASLt, which runs an addmm with a bias vector


class CublasWorkspaces:
    def __init__(self, gpu: GPU, ledger: Ledger) -> None:
        self._ledger = ledger
        self._bytes = _HOPPER_BYTES if gpu.capability[0] == 9 else _OTHER_BYTES
        self._kept: dict[tuple[str, bool], Entry] = {}
        self._were_given_back = False

    def give_back(self) -> None:
        """Free all workspaces: the stub for ``torch._C._cuda_clearCublasWorkspaces``."""
        for entry in self._kept.values():
            self._ledger.death(entry)
        self._kept.clear()
        self._were_given_back = True

    def take(self, func: Any, args: Any) -> None:
        """Before an operator runs, count the workspaces that it allocates again for its thread after ``give_back``."""
        if not self._were_given_back or func.overloadpacket not in _PRODUCTS:
            return
        thread = "backward" if is_in_backward() else "forward"
        self._take(thread, self._bytes, of_lt=False)
        if func.overloadpacket is aten.addmm and args[0].dim() == 1:
            self._take(thread, _LT_BYTES, of_lt=True)

    def _take(self, thread: str, size: int, *, of_lt: bool) -> None:
        if (thread, of_lt) not in self._kept:
            entry = self._kept[thread, of_lt] = Entry(size, "workspace that cuBLAS keeps", None)
            self._ledger.birth(entry)
