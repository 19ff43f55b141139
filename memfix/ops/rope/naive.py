"""The reference: every pair of a head's elements is rotated by position times frequency, all in float64."""

# ... leading dims, T positions, H heads, D width of a head, P pairs (half of D)

from __future__ import annotations

import torch


def naive_rope(
    x: torch.Tensor, *, base: float = 10_000.0, offset: int = 0, positions: torch.Tensor | None = None
) -> torch.Tensor:
    """Return ``x * cos + rotate_half(x) * sin`` for ``x`` of ``[..., T, H, D]``, rounded once to the dtype of ``x``.

    Positions are ``offset`` and those after it, or ``positions`` of ``[..., T]``. Every call makes four float64 tensors
    of the shape of ``x``, and computes the cosine and sine of every position again.
    """
    width = x.shape[-1]
    if positions is None:
        positions = torch.arange(offset, offset + x.shape[-3], device=x.device)
    # on the CPU: a GPU's pow is off by a few more roundings, which a large position multiplies
    frequencies_P = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_TP = positions.to(torch.float64).unsqueeze(-1) * frequencies_P.to(x.device)
    angles_T1D = torch.cat([angles_TP, angles_TP], dim=-1).unsqueeze(-2)
    wide = x.to(torch.float64)
    first, second = wide.chunk(2, dim=-1)
    turned = wide * angles_T1D.cos() + torch.cat([-second, first], dim=-1) * angles_T1D.sin()
    return turned.to(x.dtype)
