"""The signature of an operator call, which is the same on a GPU and on fake tensors. Measured bytes are keyed by it."""

from __future__ import annotations

from typing import Any

import torch


def signature(operator: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Spell a call, as ``aten.convolution.default(float32[32,64,128,128], float32[64,64,3,3], None, [1,1], ...)``."""
    spelled = [_spelled(argument) for argument in args]
    spelled += [f"{name}={_spelled(value)}" for name, value in sorted(kwargs.items())]
    return f"{operator}({', '.join(spelled)})"


def _spelled(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        shape = ",".join(map(str, value.shape))
        strides = "" if value.is_contiguous() else " strides " + ",".join(map(str, value.stride()))
        return f"{str(value.dtype).removeprefix('torch.')}[{shape}{strides}]"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_spelled, value)) + "]"
    return str(value)
