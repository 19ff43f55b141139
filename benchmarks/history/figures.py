"""Peaks, steps to time and ratios of one form at one case, for ASV and for pytest-benchmark.

It runs with the memfix of any commit, so it uses only names that exist in all of them. On a GPU, peaks are read from
the allocator; without a GPU, or if a form runs out of memory, they are simulated, so that every form has a peak and a
ratio to naive. A form is timed only if it fits: within 64 MiB on a CPU, within the GPU's memory on a GPU. The two
steps of a ratio of times alternate in one process; the ratio is n/a if either step is.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from memfix.checks.inputs import Draw
from memfix.laws import NAIVE, Phase
from memfix.meters import get_meter
from memfix.meters.base import Step
from memfix.meters.clock import race
from memfix.registry import all_contracts
from memfix.units import format_bytes

try:
    from memfix.checks.form_call import StepOf, phases_of
except ImportError:  # an earlier commit
    from memfix.checks.inputs import StepOf, phases_of  # type: ignore[attr-defined,no-redef]

FLOOR = "floor"  # equals memfix.contract.FLOOR, which earlier commits do not have
PHASES: tuple[Phase, ...] = ("forward", "train")
CPU_LIMIT_BYTES = 64 * 2**20
WARMUP, WARMUP_S = 3, 0.2
"""Untimed steps before the first timed one; no further one is started after ``WARMUP_S`` seconds of them."""
SAMPLES = (3, 20, 1.0)
"""Samples of a step's time: the least number, the largest number, and the seconds after which no more are taken."""
LEAST_PAIRS, MOST_PAIRS, SECONDS_OF_PAIRS = 3, 30, 1.0


class NotMeasurable(NotImplementedError):
    """The reason why this machine cannot measure a figure; ASV treats it as n/a."""


def _cached_on_disk(function: Callable[..., Any]) -> Callable[..., Any]:
    """Cache a measurement in memory, and under ASV also on disk in the folder that its benchmark processes share."""

    @functools.cache
    def kept(*words: str) -> Any:
        file = Path("-".join([function.__name__, *words]) + ".json")
        is_under_asv = Path("cache.pickle").exists()
        if is_under_asv and file.exists():
            return json.loads(file.read_text(encoding="utf-8"))
        figures = function(*words)
        if is_under_asv:
            file.write_text(json.dumps(figures), encoding="utf-8")
        return figures

    return functools.wraps(function)(kept)


@functools.cache  # the check can take as long as a small step
def device() -> str:
    if torch.cuda._is_in_bad_fork():
        raise RuntimeError("an op touched CUDA when it was imported, before ASV forked: add --launch-method spawn")
    return "cuda" if torch.cuda.is_available() else "cpu"


def class_name(*words: str) -> str:
    """Return the name of the benchmark class of an op, a form and a case."""
    parts = re.split(r"[^0-9A-Za-z]+", " ".join(words))
    return "".join(part[:1].upper() + part[1:] for part in parts)


def step_of(op: str, form: str, case: str, phase: Phase) -> StepOf:
    contract = all_contracts()[op]
    return StepOf(contract, form, Draw(contract.cases[case]), phase)


def phases(op: str) -> list[Phase]:
    return [phase for phase in PHASES if phase in phases_of(all_contracts()[op])]


# ---------------------------------------------------------------- bytes
@_cached_on_disk
def peaks(op: str, form: str, case: str) -> dict[str, dict[str, int]]:
    """Return for each phase the peak of requested bytes: ``bytes`` above the inputs, and ``with_inputs``."""
    found: dict[str, dict[str, int]] = {}
    for phase in phases(op):
        reading = _reading(step_of(op, form, case, phase))
        found[phase] = {"bytes": reading.peak_bytes, "with_inputs": reading.base_bytes + reading.peak_bytes}
    return found


def peak_bytes(op: str, form: str, case: str, phase: Phase) -> int:
    return peaks(op, form, case)[phase]["bytes"]


def times_below_naive(op: str, form: str, case: str, phase: Phase) -> float:
    own = peak_bytes(op, form, case, phase)
    if own == 0:
        raise NotMeasurable(f"{op}/{form} takes no memory at {case}")
    return round(peak_bytes(op, NAIVE, case, phase) / own, 3)


def _reading(build: StepOf) -> Any:
    if getattr(build.contract, "memory", "gpu") == "host":
        return get_meter("host").measure(build)
    if device() == "cuda":
        try:
            return get_meter("cuda").measure(build)
        except torch.OutOfMemoryError:
            pass
    return get_meter("simulated").measure(build)


# ---------------------------------------------------------------- time
def warm_step(build: StepOf) -> Step:
    """Build and warm up the step, or raise if it does not fit. On a GPU it returns before its kernels have ended."""
    if device() == "cpu":
        _refuse_on_cpu(build)
        torch.set_num_threads(1)
    try:
        step = build(device())
        spent_s = 0.0
        for _ in range(WARMUP):
            if spent_s < WARMUP_S:
                spent_s += elapsed_s(step)
    except torch.OutOfMemoryError:
        raise NotMeasurable(f"{build.contract.name}/{build.form} runs out of memory on this GPU") from None
    return step


def run_and_synchronize(step: Step) -> None:
    """Run one step until its kernels have ended, for wall-clock times."""
    step()
    if device() == "cuda":
        torch.cuda.synchronize()


def elapsed_s(step: Step) -> float:
    begin = time.perf_counter()
    run_and_synchronize(step)
    return time.perf_counter() - begin


def _refuse_on_cpu(build: StepOf) -> None:
    contract, form, case = build.contract, build.form, build.draw.case.name
    if getattr(contract.forms.get(form), "has_kernels", False):
        raise NotMeasurable(f"the kernels of {contract.name}/{form} are interpreted on a CPU: their time says nothing")
    if form == FLOOR:
        reading = get_meter("simulated").measure(build)
        needed = reading.base_bytes + reading.peak_bytes
    else:
        needed = peaks(contract.name, form, case)[build.phase]["with_inputs"]
    if needed > CPU_LIMIT_BYTES:
        limit = format_bytes(CPU_LIMIT_BYTES)
        raise NotMeasurable(f"{contract.name}/{form} needs {format_bytes(needed)}, a CPU is given {limit}")


RATIOS = ("overhead", "over_floor")


def ratio(op: str, form: str, case: str, name: str) -> float:
    """Return the form's time over naive's (``overhead``) or the floor's (``over_floor``), in the longest phase."""
    found = _ratio(op, form, case, name)
    if isinstance(found, str):
        raise NotMeasurable(found)
    return found


@_cached_on_disk
def _ratio(op: str, form: str, case: str, name: str) -> float | str:
    peaks(op, form, case)  # fill the cache for the next benchmark, whose process would have to initialise CUDA
    phase = phases(op)[-1]
    naive, floor = step_of(op, NAIVE, case, phase), step_of(op, FLOOR, case, "forward")
    try:
        return _interleaved(step_of(op, form, case, phase), naive if name == "overhead" else floor)
    except NotMeasurable as reason:
        return str(reason)


def ratios_of(op: str, form: str) -> list[str]:
    """Return the names of the ratios that a form has by its contract."""
    has = {"overhead": form != NAIVE, "over_floor": getattr(all_contracts()[op], "floor", None) is not None}
    return [name for name in RATIOS if has[name]]


def _interleaved(first: StepOf, second: StepOf) -> float:
    """Time pairs of steps for about a second, within the bounds of their number; return the ratio."""
    naive_first = sorted((first, second), key=lambda build: build.form != NAIVE)
    by_form = {build.form: warm_step(build) for build in naive_first}  # if naive does not fit, the form need not run
    steps = by_form[first.form], by_form[second.form]
    pairs = int(SECONDS_OF_PAIRS / sum(map(elapsed_s, steps)))
    try:
        found = race(*steps, device=device(), pairs=max(LEAST_PAIRS, min(MOST_PAIRS, pairs)))
    except torch.OutOfMemoryError:
        raise NotMeasurable(f"{first.form} and {second.form} do not fit this GPU one after the other") from None
    return round(found.ratio, 4)
