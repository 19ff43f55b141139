"""Checks of claims about the RoPE cache: the report's code before and after its fix, run on the CPU and on meta."""

# T positions, P pairs of a head

from __future__ import annotations

import torch

from ....ops.rope.reported import ReportedRotary
from ...evidence import raised
from ...judging import ON_CPU, CheckResult, as_recorded, check, holds_if
from . import SIZE, Evidence

# the meta device stands for a GPU: the same calls refuse tensors of two devices
CPU_AND_META = "run on CPU and meta"


def _x(positions: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, positions, 1, SIZE.head_width, device=device, dtype=dtype)


@check("LOG-23")
def longer_than_the_cache(evidence: Evidence) -> CheckResult:
    """Rotate a sequence within the cache, and a longer one, which must raise the error of two devices."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8, positions_on_cpu=True).to("meta")
    within, longer = raised(rotary, _x(8, "meta")), raised(rotary, _x(9, "meta"))
    return as_recorded(CPU_AND_META, within=within, longer=longer)


@check("LOG-24")
def positions_on_another_device(evidence: Evidence) -> CheckResult:
    """Run the line that failed, with positions on another device than the frequencies and on the same one."""
    inv_freq_P = torch.ones(4, device="meta")
    apart, together = (
        raised(torch.outer, torch.arange(9, dtype=inv_freq_P.dtype, device=device), inv_freq_P)
        for device in ("cpu", "meta")
    )
    return as_recorded(CPU_AND_META, apart=apart, together=together)


@check("LOG-26")
def positions_where_frequencies_are(evidence: Evidence) -> CheckResult:
    """Grow the fixed cache before and after a move of its module, and look for it in the state dict."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8)
    devices = []
    for positions, device in ((9, "cpu"), (20, "meta")):
        rotary.to(device)
        devices.append((rotary(_x(positions, device)).device.type, rotary.cos_cached.device.type, device))
    right = all(len(set(three)) == 1 for three in devices) and rotary.cos_cached.shape[0] == 20
    places, saved = ", ".join(cache for _, cache, _ in devices), len(rotary.state_dict())
    return holds_if(right and not saved, CPU_AND_META, devices=places, saved=saved)


@check("LOG-27")
def frequencies_keep_their_dtype(evidence: Evidence) -> CheckResult:
    """Compare the positions of the fixed cache, in a module that was cast to bfloat16, with the exact ones."""
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
    return holds_if(
        distinct == num_positions,
        ON_CPU,
        positions=num_positions,
        distinct=distinct,
        first_wrong=_first(positions_T.long() != exact_T),
        largest_error=f"{float(error.max()):.1f}",
        mean_error=f"{float(error.mean()):.2f}",
        first_infinite=_first(half_T.isinf()),
    )


def _first(mask_T: torch.Tensor) -> int | str:
    found = mask_T.nonzero()
    return int(found[0]) if len(found) else "none"


@check("LOG-28")
def regrowth(evidence: Evidence) -> CheckResult:
    """Test that the fixed cache grows only for a longer sequence, and keeps its rows."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8)
    before = rotary.cos_cached
    rotary(_x(5))
    reused = rotary.cos_cached is before
    rotary(_x(30))
    kept = torch.equal(rotary.cos_cached[:8], before)
    grown = rotary.cos_cached
    rotary(_x(30))
    not_again = rotary.cos_cached is grown
    length = grown.shape[0]
    holds = reused and kept and not_again and length == 30
    return holds_if(holds, ON_CPU, length=length, prefix="unchanged" if kept else "changed")
