"""Argument checks that every form of rope makes."""

from __future__ import annotations

import torch

from ..arguments import require_floating, require_int, require_integer, require_number, require_same


def require_rope(x: torch.Tensor, base: float, offset: int) -> None:
    """Refuse what cannot be rotated, before anything is allocated."""
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
    return require_number("base", base, "above 0 and finite", lambda value: value > 0)


def require_position(name: str, value: object) -> int:
    return require_int(name, value, at_least=0)


def require_positions(positions: torch.Tensor, x: torch.Tensor, offset: int) -> None:
    """Refuse ``positions`` unless they are ``[T]``, or ``[..., T]`` with leading dims that broadcast to ``x``'s."""
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


def num_positions_of(positions: torch.Tensor, max_positions: int | None) -> int:
    """Return how many positions the table needs. A GPU's ``positions`` are read only if ``max_positions`` is None."""
    if positions.numel() == 0 or (max_positions is not None and positions.device.type != "cpu"):
        return max_positions or 0
    smallest, largest = torch.stack(torch.aminmax(positions)).tolist()
    if smallest < 0:
        raise ValueError(f"positions must be at least 0, got {smallest}")
    if max_positions is not None and largest >= max_positions:
        raise ValueError(f"positions must be below max_positions={max_positions}, got {largest}")
    return max(largest + 1, max_positions or 0)
