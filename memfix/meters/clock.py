"""Time, read in pairs: two steps alternate in one process, so that whatever disturbs one disturbs the other."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from .base import Step


@dataclass(frozen=True)
class Race:
    """Two steps timed in turn. ``ratio`` is the median over pairs of first over second."""

    ratio: float
    first_s: float
    second_s: float
    pairs: int


def race(first: Step, second: Step, *, device: str, pairs: int = 15, warmup: int = 2) -> Race:
    """Time ``first`` and ``second`` in ABBA order."""
    for _ in range(warmup):
        first()
        second()
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs):
        order = (0, 1) if pair % 2 == 0 else (1, 0)
        for which in order:
            times[which].append(_elapsed_s((first, second)[which], device))
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return Race(statistics.median(ratios), statistics.median(times[0]), statistics.median(times[1]), pairs)


def _elapsed_s(step: Step, device: str) -> float:
    if not device.startswith("cuda"):
        start = time.perf_counter()
        step()
        return time.perf_counter() - start
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3
