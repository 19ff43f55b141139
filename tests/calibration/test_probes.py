"""Probes and what is made of them: names, a run without a GPU, misses, and the table at the end."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

import memfix
from memfix.calibration import probes
from memfix.calibration.observe import Observation
from memfix.calibration.probes import registry
from memfix.calibration.run import _tabulated, all_probes, calibrate
from memfix.errors import EXIT_NOT_MEASURED, MeterUnavailable
from memfix.meters.base import Step, StepBuilder
from memfix.meters.simulated.gpus import H200
from memfix.meters.simulated.tables import Standing

# those that pick by values are refused where too many are unknown
SAMPLE = random.Random(0).sample(sorted(n for n in all_probes() if not n.startswith(("unique[", "bincount["))), 25)


def seen(
    measured: int = 0, predicted: int | None = 0, kept: int = 8, predicted_kept: int = 8, call: str = "mm(1)"
) -> Observation:
    return Observation("aten.mm", call, measured, predicted, kept, predicted_kept)


# ---------------------------------------------------------------- the probes
def test_every_file_of_probes_is_loaded() -> None:
    files = {path.stem for path in Path(probes.__file__).parent.glob("*.py")} - {"__init__", "registry"}
    homes = {build.func.__module__.rpartition(".")[2] for build in all_probes().values()}  # type: ignore[attr-defined]
    assert homes == files


def test_a_probe_is_named_by_its_function_and_its_point() -> None:
    names = list(all_probes())
    assert "mm[left=rows,right=gapped]" in names
    assert "linear_and_its_backward[dtype=bfloat16]" in names
    assert "mv_of_a_repeated_vector" in names
    assert not [name for name in names if name.startswith("_") or "torch." in name]


def test_asking_twice_gives_the_same_probes() -> None:
    assert list(all_probes()) == list(all_probes())


def test_two_probes_of_one_name_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, StepBuilder] = {}
    monkeypatch.setattr(registry, "PROBES", made)

    def _empty(device: str, size: int) -> Step:
        return lambda: torch.empty(size, device=device)

    with pytest.raises(AssertionError, match=r"two probes are called empty\[size=1\]"):
        registry.probe(size=(1, 2, 1))(_empty)
    assert list(made) == ["empty[size=1]", "empty[size=2]"]


@pytest.mark.parametrize("name", SAMPLE)
def test_a_probe_runs_on_the_simulated_gpu(name: str) -> None:
    reading = memfix.peak(all_probes()[name])
    assert reading.base_bytes + reading.peak_bytes > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_calibrating_without_a_gpu_is_refused_before_a_probe_runs() -> None:
    def build(_: str) -> Step:
        raise AssertionError("a probe was built")

    with pytest.raises(MeterUnavailable) as refused:
        calibrate({"never": build})
    assert str(refused.value) == (
        "calibrating needs a GPU, and torch sees none; without --run the known tables are shown"
    )
    assert refused.value.exit_code == EXIT_NOT_MEASURED


# ---------------------------------------------------------------- what was seen
@pytest.mark.parametrize(
    ("observation", "missed"),
    [
        (seen(), False),
        (seen(measured=512, predicted=512), False),
        (seen(measured=512, predicted=0), True),
        (seen(measured=0, predicted=512), True),
        (seen(measured=512, predicted=None), False),
        (seen(kept=16), True),
        (seen(measured=512, predicted=None, kept=16), True),
    ],
    ids=["none", "as predicted", "more", "less", "no rule", "keeps more", "no rule and keeps more"],
)
def test_a_call_is_missed_where_its_hidden_or_its_kept_bytes_differ(observation: Observation, missed: bool) -> None:
    assert observation.is_mispredicted is missed


def test_the_table_counts_calls_misses_and_calls_without_a_rule() -> None:
    sort = Observation("aten.sort", "sort(1)", 64, 64, 8, 8)
    observations = [seen(), seen(measured=1), seen(7, None, call="mm(2)"), seen(0, None, kept=9, call="mm(3)"), sort]
    table = _tabulated(H200, {"torch": "2"}, observations)
    assert (table.gpu, table.surroundings) == (H200, {"torch": "2"})
    assert table.operators == {"aten.mm": Standing(4, 2, 2), "aten.sort": Standing(1)}


def test_only_calls_without_a_rule_are_kept_as_measured() -> None:
    observations = [seen(512, 512, call="mm(1)"), seen(3, 0, call="mm(2)"), seen(7, None, call="mm(3)")]
    assert _tabulated(H200, {}, observations).measured == {"mm(3)": 7}


def test_nothing_seen_is_an_empty_table() -> None:
    table = _tabulated(H200, {}, [])
    assert (table.operators, table.measured) == ({}, {})
