"""Whole steps of probes on a GPU: what a reading calls exact is what the allocator counted."""

from __future__ import annotations

import random

import pytest

import memfix
from memfix.calibration.run import all_probes
from memfix.errors import MeasurementError

NUM_CHOSEN = 150
CHOSEN = random.Random(0).sample(sorted(all_probes()), NUM_CHOSEN)


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", CHOSEN)
def test_an_exact_reading_is_the_allocators(name: str) -> None:
    build = all_probes()[name]
    try:
        predicted = memfix.peak(build)
    except MeasurementError as refused:
        pytest.skip(f"refused in words: {refused}")
    if not predicted.exact:
        pytest.skip(f"an estimate, which says so: {predicted.notes[0]}")
    assert predicted.peak_bytes == memfix.peak(build, meter="cuda").peak_bytes, predicted.table()
