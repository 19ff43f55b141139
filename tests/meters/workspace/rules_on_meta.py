"""What the rules say of tensors that only have a shape."""

from __future__ import annotations

from typing import Any

import torch

from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.workspace import Call, hidden_buffers


def meta(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def hidden(operator: Any, *args: Any, outputs: Any = None, **kwargs: Any) -> list[int]:
    return hidden_buffers(Call(H200, operator, args, kwargs, outputs))
