"""Stages of a step: what each leaves behind, its peak, and that naming them costs nothing without a listener."""

from __future__ import annotations

import pytest
import torch

import memfix
from memfix.meters.base import Reading, Step
from memfix.meters.cuda import StagePeaks
from memfix.meters.stages import Stage, listening, stage

MiB = 1 << 20


def empty(mebibytes: int, device: str) -> torch.Tensor:
    return torch.empty(mebibytes * MiB, dtype=torch.uint8, device=device)


def in_three_stages(device: str) -> Step:
    base = empty(8, device)

    def step() -> object:
        before = empty(1, device)
        stage("grows")
        kept = empty(4, device)
        stage("spikes")
        spike = empty(16, device)
        del spike
        stage("rests")
        stage(None)
        beside = empty(32, device)
        del beside, before
        stage("shrinks")
        del kept
        return base

    return step


def sizes(reading: Reading) -> list[tuple[str, int, int, int]]:
    """In MiB above what was there before the step, of which a GPU has more: workspaces of earlier tests."""
    return [
        (s.name, *((size - reading.base_bytes) // MiB for size in (s.start_bytes, s.end_bytes, s.peak_bytes)))
        for s in reading.stages
    ]


THREE_STAGES = [("grows", 1, 5, 5), ("spikes", 5, 5, 21), ("rests", 5, 5, 5), ("shrinks", 4, 0, 4)]


def test_each_stage_has_its_start_its_end_and_its_peak() -> None:
    reading = memfix.peak(in_three_stages)
    assert sizes(reading) == THREE_STAGES
    assert (reading.peak_bytes, reading.base_bytes) == ((1 + 4 + 32) * MiB, 8 * MiB)
    assert [s.added_bytes // MiB for s in reading.stages] == [4, 0, 0, -4]


def test_a_stage_knows_what_was_alive_at_its_end_and_at_its_peak() -> None:
    grows, spikes, *_ = memfix.peak(in_three_stages).stages
    assert [(row.bytes // MiB, row.count) for row in grows.alive_at_end] == [(5, 2)]  # two of one line
    assert sum(row.bytes for row in spikes.alive_at_peak) == 21 * MiB
    assert sum(row.bytes for row in spikes.alive_at_end) == 5 * MiB
    assert "test_stages.py" in spikes.alive_at_peak[0].place


def test_a_stage_that_is_named_again_goes_on() -> None:
    def build(device: str) -> Step:
        def step() -> object:
            kept = []
            for _ in range(3):
                stage("loop")
                kept.append(empty(1, device))
            return kept

        return step

    assert sizes(memfix.peak(build)) == [("loop", 0, 3, 3)]


def test_without_marks_a_reading_has_no_stages_and_says_nothing_of_them() -> None:
    reading = memfix.peak(lambda device: lambda: empty(1, device))
    assert reading.stages == ()
    assert "stages" not in reading.as_dict()
    assert Reading.from_dict(reading.as_dict()).stages == ()


def test_stages_survive_json() -> None:
    reading = memfix.peak(in_three_stages)
    assert Reading.from_dict(reading.as_dict()) == reading


def test_where_nobody_listens_a_mark_does_nothing() -> None:
    heard: list[str | None] = []
    stage("unheard")
    with listening(heard.append):
        stage("heard")
        with listening(None):
            stage("unheard")
        stage(None)
    stage("unheard")
    assert heard == ["heard", None]


def test_a_failed_step_leaves_no_listener_behind() -> None:
    heard: list[str | None] = []
    with pytest.raises(KeyError), listening(heard.append):
        raise KeyError
    stage("unheard")
    assert heard == []


# ---------------------------------------------------------------- the allocator's own peaks
def test_peaks_between_marks_are_read_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    live, peak = {"now": 0}, {"highest": 0}

    def stats(device: int | None) -> dict[str, int]:
        return {f"{c}_bytes.all.{k}": v for c in ("requested", "allocated", "reserved")
                for k, v in (("current", live["now"]), ("peak", peak["highest"]))}  # fmt: skip

    def take(size: int) -> None:
        live["now"] += size
        peak["highest"] = max(peak["highest"], live["now"])

    monkeypatch.setattr(torch.cuda, "memory_stats", stats)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: peak.update(highest=live["now"]))
    peaks = StagePeaks()
    take(100)
    take(-90)
    peaks.enter("first")
    take(50)
    take(-40)
    peaks.enter("first")
    peaks.enter("second")
    take(5)
    assert peaks.finished()["requested_bytes.all.peak"] == 100
    assert peaks.stages == [Stage("first", 10, 20, 60), Stage("second", 20, 25, 25)]


@pytest.mark.gpu(use="meters")
def test_a_gpu_gives_the_stages_that_were_simulated() -> None:
    real = memfix.peak(in_three_stages, meter="cuda")
    assert sizes(real) == THREE_STAGES
    assert real.peak_bytes == memfix.peak(in_three_stages).peak_bytes
