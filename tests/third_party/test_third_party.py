"""Unmodified code of other packages under the simulated meter, where they are installed."""

from __future__ import annotations

import pytest

import memfix
from benchmarks.third_party import WORKLOADS, missing


def build_of(name: str):
    package, build = WORKLOADS[name]
    reason = missing(package)
    if reason is not None:
        pytest.skip(reason)
    return build


@pytest.mark.parametrize("name", WORKLOADS)
def test_other_peoples_code_runs_unmodified(name: str) -> None:
    reading = memfix.peak(build_of(name))
    assert reading.peak_bytes > 2**20
    assert all("assumed that" in note for note in reading.notes), reading.notes


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", WORKLOADS)
def test_other_peoples_code_takes_what_is_predicted(name: str) -> None:
    build = build_of(name)
    assert memfix.peak(build).peak_bytes == memfix.peak(build, meter="cuda").peak_bytes
