"""Checks of what the report says of its RoPE cache: its code as it failed and as it was fixed, run on CPU and meta."""

# T positions, P pairs of a head

from __future__ import annotations

from collections.abc import Callable

import torch

from ....ops.rope.reported import ReportedRotary
from ...claims import Found
from .evidence import SIZE, Evidence

# a CPU has one device: a tensor on meta is as far from the CPU as one on a GPU, and stops in the same call
CPU_AND_META = "run on CPU and meta"


def _x(positions: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, positions, 1, SIZE.head_width, device=device, dtype=dtype)


def _raised(function: Callable[..., object], *args: torch.Tensor) -> str:
    try:
        function(*args)
    except Exception as error:
        return type(error).__name__
    return "nothing"


def longer_than_the_cache(evidence: Evidence) -> Found:
    """LOG-23: a sequence within the cache is served, a longer one stops with the error of two devices."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8, positions_on_cpu=True).to("meta")
    figures = {"within": _raised(rotary, _x(8, "meta")), "longer": _raised(rotary, _x(9, "meta"))}
    return Found(figures == {"within": "nothing", "longer": "RuntimeError"}, CPU_AND_META, figures)


def positions_on_another_device(evidence: Evidence) -> Found:
    """LOG-24: the very line: positions of the CPU and frequencies of elsewhere in one product."""
    inv_freq_P = torch.ones(4, device="meta")
    figures = {
        "apart": _raised(torch.outer, torch.arange(9, dtype=inv_freq_P.dtype), inv_freq_P),
        "together": _raised(torch.outer, torch.arange(9, dtype=inv_freq_P.dtype, device="meta"), inv_freq_P),
    }
    return Found(figures == {"apart": "RuntimeError", "together": "nothing"}, CPU_AND_META, figures)


def positions_where_frequencies_are(evidence: Evidence) -> Found:
    """LOG-26: the fixed cache grows where its module is, before and after a move, and is in no checkpoint."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8)
    devices = []
    for positions, device in ((9, "cpu"), (20, "meta")):
        rotary.to(device)
        devices.append((rotary(_x(positions, device)).device.type, rotary.cos_cached.device.type, device))
    right = all(len(set(three)) == 1 for three in devices) and rotary.cos_cached.shape[0] == 20
    figures: dict[str, int | str] = {
        "devices": ", ".join(cache for _, cache, _ in devices),
        "saved": len(rotary.state_dict()),
    }
    return Found(right and not rotary.state_dict(), CPU_AND_META, figures)


def frequencies_keep_their_dtype(evidence: Evidence) -> Found:
    """LOG-27: positions of the fixed cache in a module that was cast, beside those that they should be."""
    num_positions = evidence.dims["T"]
    exact_T = torch.arange(num_positions)
    wide, narrow = (ReportedRotary(SIZE.head_width, cached_positions=1) for _ in range(2))
    narrow.to(torch.bfloat16)
    wide(_x(num_positions))
    narrow(_x(num_positions, dtype=torch.bfloat16))
    error = (narrow.cos_cached.float() - wide.cos_cached).abs()
    positions_T = torch.arange(num_positions, dtype=narrow.inv_freq.dtype)
    half_T = torch.arange(num_positions).to(torch.float16)
    distinct = positions_T.unique().numel()
    figures: dict[str, int | str] = {
        "positions": num_positions,
        "distinct": distinct,
        "first_wrong": _first(positions_T.long() != exact_T),
        "largest_error": f"{float(error.max()):.1f}",
        "mean_error": f"{float(error.mean()):.2f}",
        "first_infinite": _first(half_T.isinf()),
    }
    return Found(distinct == num_positions, "run on the CPU", figures)


def _first(mask_T: torch.Tensor) -> int | str:
    found = mask_T.nonzero()
    return int(found[0]) if len(found) else "none"


def regrowth(evidence: Evidence) -> Found:
    """LOG-28: the fixed cache grows only for a longer sequence, and keeps the rows that it had."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8)
    before = rotary.cos_cached
    rotary(_x(5))
    reused = rotary.cos_cached is before
    rotary(_x(30))
    kept = torch.equal(rotary.cos_cached[:8], before)
    grown = rotary.cos_cached
    rotary(_x(30))
    not_again = rotary.cos_cached is grown
    figures: dict[str, int | str] = {"length": grown.shape[0], "prefix": "unchanged" if kept else "changed"}
    return Found(reused and kept and not_again and grown.shape[0] == 30, "run on the CPU", figures)


CHECKS = {
    check.__name__: check
    for check in (
        longer_than_the_cache,
        positions_on_another_device,
        positions_where_frequencies_are,
        frequencies_keep_their_dtype,
        regrowth,
    )
}
