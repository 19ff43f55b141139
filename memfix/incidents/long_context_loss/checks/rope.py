"""Checks of what the report says of its RoPE cache: its code as it failed and as it was fixed, run on CPU and meta."""

# T positions, P pairs of a head

from __future__ import annotations

import torch

from ....ops.rope.reported import ReportedRotary
from ...claims import Claim
from ...evidence import raised
from ...judging import ON_CPU, CheckResult, as_expected, check, result
from .evidence import SIZE, Evidence

# a CPU has one device: a tensor on meta is as far from the CPU as one on a GPU, and stops in the same call
CPU_AND_META = "run on CPU and meta"


def _x(positions: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(1, positions, 1, SIZE.head_width, device=device, dtype=dtype)


@check("LOG-23")
def longer_than_the_cache(evidence: Evidence, claim: Claim) -> CheckResult:
    """A sequence within the cache is served, a longer one stops with the error of two devices."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8, positions_on_cpu=True).to("meta")
    within, longer = raised(rotary, _x(8, "meta")), raised(rotary, _x(9, "meta"))
    return as_expected(claim, CPU_AND_META, within=within, longer=longer)


@check("LOG-24")
def positions_on_another_device(evidence: Evidence, claim: Claim) -> CheckResult:
    """The line that failed: positions on the CPU and frequencies elsewhere, in one product."""
    inv_freq_P = torch.ones(4, device="meta")
    apart, together = (
        raised(torch.outer, torch.arange(9, dtype=inv_freq_P.dtype, device=device), inv_freq_P)
        for device in ("cpu", "meta")
    )
    return as_expected(claim, CPU_AND_META, apart=apart, together=together)


@check("LOG-26")
def positions_where_frequencies_are(evidence: Evidence) -> CheckResult:
    """The fixed cache grows where its module is, before and after a move, and is in no checkpoint."""
    rotary = ReportedRotary(SIZE.head_width, cached_positions=8)
    devices = []
    for positions, device in ((9, "cpu"), (20, "meta")):
        rotary.to(device)
        devices.append((rotary(_x(positions, device)).device.type, rotary.cos_cached.device.type, device))
    right = all(len(set(three)) == 1 for three in devices) and rotary.cos_cached.shape[0] == 20
    places, saved = ", ".join(cache for _, cache, _ in devices), len(rotary.state_dict())
    return result(right and not saved, CPU_AND_META, devices=places, saved=saved)


@check("LOG-27")
def frequencies_keep_their_dtype(evidence: Evidence) -> CheckResult:
    """Positions of the fixed cache in a module that was cast, beside those that they should be."""
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
    return result(
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
    """The fixed cache grows only for a longer sequence, and keeps the rows that it had."""
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
    return result(holds, ON_CPU, length=length, prefix="unchanged" if kept else "changed")
