"""pytest-benchmark cases of every op, form and case in the registry: ``pytest benchmarks --benchmark-only``.

Cases are grouped by op, case and phase; peaks and ratios are in ``extra_info``. They check nothing: the gate does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from memfix.laws import NAIVE, Phase
from memfix.registry import all_contracts

from .history import figures


def _subjects() -> Iterator[Any]:
    for op, contract in all_contracts().items():
        for case in contract.cases:
            for phase in figures.phases(op):
                for form in (NAIVE, *contract.forms):
                    yield pytest.param(op, form, case, phase, id=f"{op}-{case}-{phase}-{form}")


@pytest.mark.parametrize(("op", "form", "case", "phase"), _subjects())
def test_time(benchmark: Any, op: str, form: str, case: str, phase: Phase) -> None:
    benchmark.group = f"{op} {case} {phase}"
    try:
        step = figures.warm_step(figures.step_of(op, form, case, phase))
    except figures.NotMeasurable as reason:
        pytest.skip(str(reason))
    rounds, most, seconds = figures.SAMPLES
    benchmark.extra_info.update(_figures(op, form, case, phase))
    took_s = figures.elapsed_s(step)
    benchmark.pedantic(figures.run_and_synchronize, args=(step,), rounds=max(rounds, min(most, int(seconds / took_s))))


def _figures(op: str, form: str, case: str, phase: Phase) -> dict[str, float]:
    """Return the peaks and ratios that this machine can measure; ratios of times are for the longest phase only."""
    wanted: dict[str, Callable[[], float]] = {"peak_bytes": lambda: figures.peak_bytes(op, form, case, phase)}
    if form != NAIVE:
        wanted["times_below_naive"] = lambda: figures.times_below_naive(op, form, case, phase)
    if phase == figures.phases(op)[-1]:
        for name in figures.ratios_of(op, form):
            wanted[name] = lambda name=name: figures.ratio(op, form, case, name)  # type: ignore[misc]
    found = {}
    for name, figure in wanted.items():
        try:
            found[name] = figure()
        except figures.NotMeasurable:
            continue
    return found
