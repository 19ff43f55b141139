"""The simulated peak of each workload against what an H200's allocator counted."""

from __future__ import annotations

import dataclasses
import functools
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

import memfix
from memfix.meters.base import Reading
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.tables import table_of
from memfix.meters.simulated.workspace.cudnn.library import version

from .workloads import WORKLOADS, convolutions


@dataclasses.dataclass(frozen=True)
class Measured:
    """A line of ``peaks.json``: what the H200 showed."""

    peak_bytes: int
    base_bytes: int
    """Counts what cuBLAS keeps between steps."""
    allocated_bytes: int
    needs: str | None = None
    """A package without which torch runs other operators than it did on the H200."""


_MEASURED = {
    name: Measured(**line)
    for name, line in json.loads(Path(__file__).with_name("peaks.json").read_text())["workloads"].items()
}


_CUDNN = table_of(H200).cudnn  # type: ignore[union-attr]  # the H200 has a table
_SLOW = ("kda_chunk64", "kda_dense_scan", "scan_elementwise")


@functools.cache
def _predicted(name: str) -> Reading:
    # without the timeline: 91 of them are a lot of objects
    return dataclasses.replace(memfix.peak(WORKLOADS[name]), timeline=None)


def _judge(predicted: Reading, peak_bytes: int) -> None:
    notes = "".join(f"\n  {note}" for note in predicted.notes)
    assert predicted.peak_bytes == peak_bytes, f"{predicted.peak_bytes - peak_bytes:+,}{notes}\n{predicted.table()}"


def _differs_here(name: str) -> str | None:
    """Why the H200's bytes are not those of what is installed here; None if they are."""
    needs = _MEASURED[name].needs
    if needs is not None and find_spec(needs) is None:
        return f"{needs} chose the operators on the H200; it is not here"
    if WORKLOADS[name].__module__ == convolutions.__name__ and version() not in (None, _CUDNN):
        return f"cuDNN {_CUDNN} chose the workspaces on the H200; {version()} is installed here"
    return None


@pytest.mark.parametrize("name", WORKLOADS)
def test_prediction_is_what_an_h200_measured(name):
    if (reason := _differs_here(name)) is not None:
        pytest.skip(reason)
    _judge(_predicted(name), _MEASURED[name].peak_bytes)


@pytest.mark.gpu(use="meters")
@pytest.mark.parametrize("name", WORKLOADS)
def test_prediction_is_what_this_gpu_measures(name):
    _judge(_predicted(name), memfix.peak(WORKLOADS[name], meter="cuda").peak_bytes)


def test_every_workload_was_measured_and_the_file_is_sorted():
    assert sorted(WORKLOADS) == list(_MEASURED)
    assert len(_MEASURED) == 91


def test_all_are_known_to_be_exact():
    here = [name for name in sorted(WORKLOADS) if name not in _SLOW and _differs_here(name) is None]
    assert [name for name in here if not _predicted(name).exact] == []
