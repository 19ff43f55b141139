"""What ops say when their arguments do not fit: the argument, the rule, the value."""

from __future__ import annotations

import torch


def require_shape(name: str, tensor: object, axes: str) -> torch.Tensor:
    """``tensor`` as a tensor with one dimension per word of ``axes``, such as ``"V D"``."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != len(axes.split()):
        raise ValueError(f"{name} must be [{', '.join(axes.split())}], got shape {list(tensor.shape)}")
    return tensor


def require_same(what: str, **values: object) -> None:
    """All ``values`` alike: ``require_same("device", hidden=hidden.device, weight=weight.device)``."""
    if len(set(values.values())) > 1:
        raise ValueError(
            f"{' and '.join(values)} must have the same {what}, got {', '.join(map(str, values.values()))}"
        )


def require_floating(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise ValueError(f"{name} must be floating, got {tensor.dtype}")


def require_integer(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {tensor.dtype}")


def require_at_least_one(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def require_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")
