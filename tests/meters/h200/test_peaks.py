"""The simulated peak of each workload against what an H200's allocator counted."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import pytest

import memfix
from memfix.meters.base import Reading

from .workloads import WORKLOADS


@dataclasses.dataclass(frozen=True)
class Measured:
    """A line of ``peaks.json``: what the H200 showed, and how far from it a prediction may be."""

    peak_bytes: int
    base_bytes: int
    """Counts what cuBLAS keeps between steps."""
    allocated_bytes: int
    inexact: str | None = None
    """Why the prediction need not be equal to the byte."""
    within: float = 0.0
    """How far off it may then be, as a share of the peak."""
    needs: str | None = None
    """A package without which torch runs other operators than it did on the H200."""


_MEASURED = {
    name: Measured(**line)
    for name, line in json.loads(Path(__file__).with_name("peaks.json").read_text())["workloads"].items()
}
_EXACT_MEANS_WITHIN = 0.001


@functools.cache
def _predicted(name: str) -> Reading:
    # without the timeline: 91 of them are a lot of objects
    return dataclasses.replace(memfix.peak(WORKLOADS[name]), timeline=None)


def _judge(predicted: Reading, peak_bytes: int, allowed: Measured) -> None:
    off_bytes = predicted.peak_bytes - peak_bytes
    notes = "".join(f"\n  {note}" for note in predicted.notes)
    verdict = f"predicted {predicted.peak_bytes:,}, measured {peak_bytes:,} ({off_bytes:+,}){notes}"
    if predicted.exact:
        assert abs(off_bytes) <= _EXACT_MEANS_WITHIN * peak_bytes, f"says it is exact: {verdict}\n{predicted.table()}"
    assert abs(off_bytes) <= allowed.within * peak_bytes, f"{verdict}\n{predicted.table()}"


@pytest.mark.parametrize("name", WORKLOADS)
def test_prediction_is_what_an_h200_measured(name):
    allowed = _MEASURED[name]
    if allowed.needs is not None:
        pytest.importorskip(allowed.needs, reason=f"{allowed.needs} chose the operators on the H200; it is not here")
    _judge(_predicted(name), allowed.peak_bytes, allowed)


@pytest.mark.gpu
@pytest.mark.parametrize("name", WORKLOADS)
def test_prediction_is_what_this_gpu_measures(name):
    _judge(_predicted(name), memfix.peak(WORKLOADS[name], meter="cuda").peak_bytes, _MEASURED[name])


def test_every_workload_was_measured_and_the_file_is_sorted():
    assert sorted(WORKLOADS) == list(_MEASURED)


def test_allowances_are_few_and_say_why():
    assert [name for name, measured in _MEASURED.items() if measured.within] == ["conv_bn_relu"]
    assert len(_MEASURED) == 91
    assert all((measured.inexact is None) == (measured.within == 0) for measured in _MEASURED.values())


@pytest.mark.parametrize(("said_exact", "off_bytes"), [(True, 2), (False, 101), (False, -101)])
def test_judge_fails_a_prediction_that_is_further_off_than_it_may_be(said_exact, off_bytes):
    allowed = Measured(peak_bytes=1000, base_bytes=0, allocated_bytes=1000, inexact="planted", within=0.1)
    reading = Reading(
        meter="simulated",
        device="planted",
        peak_bytes=1000 + off_bytes,
        base_bytes=0,
        held_bytes=0,
        leaked_bytes=0,
        allocated_bytes=1000,
        exact=said_exact,
    )
    with pytest.raises(AssertionError, match=r"predicted .*, measured 1,000"):
        _judge(reading, 1000, allowed)
