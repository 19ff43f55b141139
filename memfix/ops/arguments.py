"""Argument checks that the ops share; an error names the argument, the rule and the value."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..errors import nearest


def require_tensor(name: str, tensor: object) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    return tensor


def require_shape(name: str, given: object, axes: str) -> torch.Tensor:
    """Return ``given``, refused unless it is a tensor with one dimension per word of ``axes``, such as ``"V D"``."""
    tensor = require_tensor(name, given)
    if tensor.dim() != axes.count(" ") + 1:
        raise ValueError(f"{name} must be [{', '.join(axes.split())}], got shape {list(tensor.shape)}")
    return tensor


def require_same(what: str, **values: object) -> None:
    """Refuse ``values`` that differ: ``require_same("device", hidden=hidden.device, weight=weight.device)``."""
    given = list(values.values())
    if given.count(given[0]) < len(given):
        raise ValueError(f"{' and '.join(values)} must have the same {what}, got {', '.join(map(str, given))}")


def require_floating(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating, got {tensor.dtype}")


def require_integer(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {tensor.dtype}")


def require_int(name: str, value: object, *, at_least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {value}")
    return value


def require_at_least_one(name: str, value: object) -> int:
    return require_int(name, value, at_least=1)


def require_one_of(name: str, value: object, known: Sequence[str]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}{nearest(str(value), known)}")


def require_number(name: str, value: object, rule: str, holds: Callable[[float], bool]) -> float:
    """Return ``value`` as a float, refused unless it is finite and ``holds(value)``; ``rule`` says this in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")
    if not holds(value) or not math.isfinite(value):
        raise ValueError(f"{name} must be {rule}, got {value}")
    return float(value)


def require_leading_dims(name: str, tensor: torch.Tensor, *, of: str, whole: torch.Tensor) -> None:
    """Refuse ``tensor`` unless its shape is that of ``whole`` without the last dim."""
    if whole.dim() == 0 or tensor.shape != whole.shape[:-1]:
        raise ValueError(
            f"{name} must have the shape of {of} without its last dim, got {list(tensor.shape)} "
            f"for {of} {list(whole.shape)}"
        )


def require_size(name: str, tensor: torch.Tensor, size: Sequence[int]) -> None:
    if tensor.shape != tuple(size):
        raise ValueError(f"{name} must have shape {list(size)} to go with q, got {list(tensor.shape)}")
