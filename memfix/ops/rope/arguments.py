"""What every form of rope demands of its arguments."""

from __future__ import annotations

import math

import torch

from ..arguments import require_floating, require_integer, require_same


def require_rope(x: torch.Tensor, base: float, offset: int) -> None:
    """Refuse what cannot be turned, before anything is allocated."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a tensor, got {type(x).__name__}")
    if x.dim() < 3:
        raise ValueError(f"x must be [..., T, H, D], got shape {list(x.shape)}")
    if x.shape[-1] < 2 or x.shape[-1] % 2:
        raise ValueError(f"x must have an even width D of at least 2, got D={x.shape[-1]}")
    require_floating(x=x)
    require_base(base)
    require_position("offset", offset)


def require_base(base: object) -> float:
    if isinstance(base, bool) or not isinstance(base, (int, float)):
        raise TypeError(f"base must be a number, got {base!r}")
    if not 0 < base < math.inf:
        raise ValueError(f"base must be above 0 and finite, got {base}")
    return float(base)


def require_position(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < 0:
        raise ValueError(f"{name} must be at least 0, got {value}")
    return value


def require_positions(positions: torch.Tensor, x: torch.Tensor, offset: int) -> None:
    """``[T]``, or ``[..., T]`` with leading dims that broadcast to those of ``x``."""
    if not isinstance(positions, torch.Tensor):
        raise TypeError(f"positions must be a tensor, got {type(positions).__name__}")
    require_integer(positions=positions)
    require_same("device", x=x.device, positions=positions.device)
    if offset:
        raise ValueError(f"give offset or positions, not both; got offset={offset}")
    wanted, given = list(x.shape[:-2]), list(positions.shape)
    leads = zip(reversed(given[:-1]), reversed(wanted[:-1]), strict=False)
    fits = 1 <= len(given) <= len(wanted) and given[-1] == wanted[-1] and all(a in (1, b) for a, b in leads)
    if not fits:
        raise ValueError(f"positions must be [..., T] and broadcast to {wanted}, got shape {given}")
