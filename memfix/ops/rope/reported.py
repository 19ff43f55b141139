"""The rope cache of the incident report, before and after its fix; kept to show where it fails.

Each layer keeps cosines and sines as buffers and recomputes them for a longer sequence. Before the fix, positions were
made on the CPU whatever the device of the frequencies. The fix names the device and keeps the frequencies' dtype:
after ``.to(torch.bfloat16)`` only 1,409 of 131,072 positions are distinct, and in float16 those from 65,520 on are
infinite. The lines that make the positions are the report's; the rest, which it does not show, is the usual code.
"""

# ... leading dims, T positions, H heads, D width of a head, P pairs (half of D)

from __future__ import annotations

import torch

from .arguments import require_rope


class ReportedRotary(torch.nn.Module):
    """One layer's cache: before the fix with ``positions_on_cpu``, else after it."""

    inv_freq: torch.Tensor
    cos_cached: torch.Tensor
    sin_cached: torch.Tensor

    def __init__(
        self, dim: int, *, base: float = 10_000.0, cached_positions: int = 2048, positions_on_cpu: bool = False
    ) -> None:
        super().__init__()
        self.positions_on_cpu = positions_on_cpu
        self.register_buffer("inv_freq", _inverse_frequencies(dim, base, "cpu"), persistent=False)
        self._grow(cached_positions)

    def _grow(self, seq_len: int) -> None:
        if self.positions_on_cpu:
            t = torch.arange(seq_len, dtype=self.inv_freq.dtype)
        else:
            t = torch.arange(seq_len, dtype=self.inv_freq.dtype, device=self.inv_freq.device)
        cos_TD, sin_TD = _cos_sin(t, self.inv_freq)
        self.register_buffer("cos_cached", cos_TD, persistent=False)
        self.register_buffer("sin_cached", sin_TD, persistent=False)

    def forward(self, x: torch.Tensor, *, offset: int = 0) -> torch.Tensor:
        last = offset + x.shape[-3]
        if last > self.cos_cached.shape[0]:
            self._grow(last)
        return _applied(x, self.cos_cached[offset:last], self.sin_cached[offset:last])


def reported_low_precision_rope(x: torch.Tensor, *, base: float = 10_000.0, offset: int = 0) -> torch.Tensor:
    """Rotate by rows ``offset`` to ``offset + T`` of the fixed cache, in a module cast to the dtype of ``x``."""
    require_rope(x, base, offset)
    inv_freq_P = _inverse_frequencies(x.shape[-1], base, x.device).to(x.dtype)
    # equals a slice of an arange from 0 in this dtype; an arange from ``offset`` in it would round its start first
    positions_T = torch.arange(offset, offset + x.shape[-3], device=x.device).to(x.dtype)
    return _applied(x, *_cos_sin(positions_T, inv_freq_P))


def _inverse_frequencies(dim: int, base: float, device: torch.device | str) -> torch.Tensor:
    return 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)


def _cos_sin(positions_T: torch.Tensor, inv_freq_P: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    freqs_TP = torch.outer(positions_T, inv_freq_P)
    freqs_TD = torch.cat([freqs_TP, freqs_TP], dim=-1)
    return freqs_TD.cos(), freqs_TD.sin()


def _applied(x: torch.Tensor, cos_TD: torch.Tensor, sin_TD: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TD[:, None, :] + torch.cat([-second, first], dim=-1) * sin_TD[:, None, :]
