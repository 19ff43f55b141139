"""Measures forms, peers and the floor at one shape: simulated peak, the allocator's peak, error, and time.

A contender that runs out of memory, gives a wrong answer or cannot run gets a row with the reason; the others go on.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

import memfix
from memfix.checks.form_call import HELD
from memfix.contract import FLOOR
from memfix.laws import NAIVE
from memfix.meters.base import Step
from memfix.meters.clock import Rounds, Times, take_turns
from memfix.units import MiB, format_bytes

from .peers import trouble_of
from .workload import Workload

WRONG_ABOVE = 0.05  # relative error in norm: far above rounding in bfloat16, far below a missing term
CPU_LIMIT_BYTES = 64 * MiB
SLOW_S = 5.0
"""Seconds of a step above which a contender is timed once, outside the rounds."""
SETTLE_S = 0.25  # a GPU that was just idle runs faster, until it nears its power limit
CROWDED_SHARE = 0.7
"""Share of the GPU's memory above which the allocator cannot cache the blocks of all contenders at once."""

Figures = dict[str, Any]
Rows = dict[str, Figures]
"""Figures by contender. A contender whose figures have a ``trouble`` is not measured further."""


def running(rows: Mapping[str, Figures]) -> list[str]:
    return [name for name, row in rows.items() if "trouble" not in row]


# ---------------------------------------------------------------- simulated peaks
def simulated(work: Workload, names: Iterable[str], phase: str, device: str) -> Rows:
    """Read peaks with the simulated meter. On a CPU, a step whose peak is too large is refused before it runs."""
    rows: Rows = {}
    for name in names:
        try:
            reading = memfix.peak(work.builder(name, phase))
        except Exception as error:
            rows[name] = {"not_simulated": trouble_of(error)}
            continue
        rows[name] = {"simulated_bytes": reading.peak_bytes}
        needed = reading.base_bytes + reading.peak_bytes
        if device == "cpu" and needed > CPU_LIMIT_BYTES:
            limit = format_bytes(CPU_LIMIT_BYTES)
            rows[name]["trouble"] = f"needs {format_bytes(needed)}, a CPU is given {limit}"
    return rows


# ---------------------------------------------------------------- error
def errors_at(work: Workload, names: Iterable[str], device: str) -> Rows:
    """Compare every contender's outputs and gradients with naive in float64: relative errors, or its trouble.

    If naive cannot run in float64, the only row is ``naive``, with the reason.
    """
    try:
        if device == "cpu":
            wide = replace(work, draw=replace(work.draw, case=replace(work.draw.case, dtype="float64")))
            refused = simulated(wide, [NAIVE], "train", device)[NAIVE].get("trouble")
            if refused is not None:
                return {NAIVE: {"not_checked": f"naive in float64 {refused}"}}
        truth = work.truth(device)
    except Exception as error:
        return {NAIVE: {"not_checked": f"naive in float64: {trouble_of(error)}"}}
    rows: Rows = {name: {} for name in names}
    for name, row in rows.items():
        attempt(row, device, work.errors, name, device, truth)
    return rows


def wrong_in(errors: Mapping[str, Any]) -> str | None:
    """Return why a contender with these errors is not timed, or None."""
    if "trouble" in errors:
        return str(errors["trouble"])
    for name, error in errors.items():
        # "not <=": NaN is wrong too; parts of an answer, with a comma in their name, are only shown
        if name != "not_checked" and "," not in name and not error <= WRONG_ABOVE:
            return f"wrong: {name} is off by {error:.1e} of its norm"
    return None


# ---------------------------------------------------------------- first call and peak
def first_call_and_peak(work: Workload, name: str, phase: str, device: str) -> Figures:
    """Measure the time of the first call, which compiles and tunes kernels, and the peak of the next one."""
    begin, calls_s = time.perf_counter(), []

    def build(device: str) -> Step:
        step = work.builder(name, phase)(device)

        def timed() -> object:
            start = time.perf_counter()
            result = step()
            if device != "cpu":
                torch.cuda.synchronize()
            end = time.perf_counter()
            calls_s.append(end - start if calls_s else end - begin)
            return result

        return timed

    if device == "cpu":
        build(device)()
        figures: Figures = {"first_call_s": calls_s[0], "peak_bytes": None}
    else:
        reading = memfix.peak(build, meter="cuda")
        figures = {
            "first_call_s": calls_s[0],
            "peak_bytes": reading.peak_bytes,
            "allocated_bytes": reading.allocated_bytes,
            # a train step marks the point between forward and backward
            "held_bytes": next((m.start_bytes - reading.base_bytes for m in reading.stages if m.name == HELD), None),
        }
    if calls_s[-1] > SLOW_S:
        figures |= {"seconds": calls_s[-1], "times_s": calls_s[-1:], "repeats": 1, "note": "timed once"}
    return figures


# ---------------------------------------------------------------- time
def timed(work: Workload, rows: Rows, phase: str, device: str, rounds: Rounds) -> int:
    """Add times to the rows of all contenders without trouble; return the number of rounds."""
    times = _times_in_turns(work, rows, phase, device, rounds)
    num_rounds = max((len(of_one.times_s) for of_one in times.values()), default=0)
    times |= {name: Times(row["times_s"]) for name, row in rows.items() if "seconds" in row}
    for name in running(rows):
        rows[name] |= _time_figures(name, times, running(rows))
    return num_rounds


def _times_in_turns(work: Workload, rows: Rows, phase: str, device: str, rounds: Rounds) -> dict[str, Times]:
    names = [name for name in running(rows) if "seconds" not in rows[name]]
    if not names:
        return {}
    steps: dict[str, Step] = {}
    inputs = work.rotated_inputs(device)

    def build(name: str) -> Figures:
        steps[name] = work.step(name, phase, inputs)
        return {}

    for name in names:
        attempt(rows[name], device, build, name)
    is_crowded = _is_crowded(rows, device)
    to_release = False

    def failed(name: str, error: Exception) -> None:
        nonlocal to_release
        to_release = True  # the error's frames keep tensors alive until the error is gone
        rows[name]["trouble"] = trouble_of(error)

    def before_each() -> None:
        nonlocal to_release
        if is_crowded or to_release:
            _release(device)
        to_release = False

    taken = take_turns(
        steps, device=device, rounds=rounds, failed=failed, settle_s=0.0 if device == "cpu" else SETTLE_S,
        before_each=before_each,
    )  # fmt: skip
    return {name: Times([time_s / work.calls for time_s in of.times_s], of.repeats) for name, of in taken.items()}


def _time_figures(name: str, times: Mapping[str, Times], everybody: Iterable[str]) -> Figures:
    own = times[name]
    figures: Figures = {"seconds": own.median_s, "times_s": own.times_s, "repeats": own.repeats}
    for reference in (FLOOR, NAIVE):
        if reference in everybody and name != reference:
            other = times[reference]
            figures[f"times_{reference}"] = own.median_s / other.median_s
            if len(own.times_s) == len(other.times_s):  # both were timed in the same rounds
                pairs = zip(own.times_s, other.times_s, strict=True)
                figures[f"pairs_over_{reference}"] = spread([a / b for a, b in pairs])
    return figures


def spread(ratios: list[float]) -> dict[str, float]:
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "pairs": len(ratios)}


def _is_crowded(rows: Rows, device: str) -> bool:
    if device == "cpu":
        return False
    in_all = torch.cuda.memory_allocated() + sum(row.get("peak_bytes") or 0 for row in rows.values())
    return bool(in_all > CROWDED_SHARE * torch.cuda.mem_get_info()[1])


def attempt(row: Figures, device: str, action: Callable[..., Figures], *arguments: object) -> None:
    """Add the figures that ``action`` returns to ``row``, or its error."""
    try:
        row |= action(*arguments)
    except Exception as error:
        row["trouble"] = trouble_of(error)
    if "trouble" in row:  # after the except block the error is gone, and so are the tensors of its frames
        _release(device)


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
