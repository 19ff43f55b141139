"""Counts the work of matrix products."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class MultiplyAdds(TorchDispatchMode):
    """Counts the multiply-adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            *_, left, right = args
            self.total += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))
