"""The trace is what ui.perfetto.dev reads."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from timelines import GiB, empty, gpt_step, hostile, known_peak, many_events, single_event

from memfix.meters.timeline import Timeline
from memfix.pictures.trace import MAX_BUFFERS, as_trace


def events(timeline: Timeline, phase: str) -> list[dict[str, Any]]:
    return [e for e in json.loads(as_trace(timeline, "title"))["traceEvents"] if e["ph"] == phase]


def test_the_counter_follows_the_live_bytes() -> None:
    assert [(e["ts"], e["args"]["bytes"]) for e in events(known_peak(), "C")] == [
        (0, GiB), (1, 3 * GiB), (2, 6 * GiB), (3, 3 * GiB), (4, 3 * GiB + GiB // 2), (5, 3 * GiB),
    ]  # fmt: skip


def test_every_stage_is_a_slice() -> None:
    slices = [e for e in events(known_peak(), "X") if e["cat"] == "stage"]
    assert [(e["name"], e["ts"], e["dur"]) for e in slices] == [("forward", 0, 3), ("backward", 3, 3)]


def test_a_buffer_is_a_slice_from_its_birth_to_its_death_or_the_end() -> None:
    slices = {e["name"]: e for e in events(known_peak(), "X") if e["cat"] == "buffer"}
    assert slices.keys() == {"1.00 GiB existed before", "2.00 GiB mm", "3.00 GiB log_softmax", "512.00 MiB mm"}
    assert (slices["3.00 GiB log_softmax"]["ts"], slices["3.00 GiB log_softmax"]["dur"]) == (2, 1)
    kept = slices["2.00 GiB mm"]
    assert kept["ts"] + kept["dur"] == 6
    assert kept["args"] == {
        "bytes": 2 * GiB, "what": "mm", "place": "loss.py:41", "function": "loss", "code": "", "stage": "forward",
        "outlives the step": True,
    }  # fmt: skip


@pytest.mark.parametrize("make", [empty, single_event, known_peak, hostile, lambda: many_events(5000)])
def test_times_ascend_and_slices_of_a_track_do_not_overlap(make) -> None:
    every = json.loads(as_trace(make(), "title"))["traceEvents"]
    assert [e["ts"] for e in every] == sorted(e["ts"] for e in every)
    assert {e["ph"] for e in every} <= {"M", "C", "X"}
    slices = sorted((e["pid"], e["tid"], e["ts"], e["dur"]) for e in every if e["ph"] == "X")
    for (pid, tid, start, duration), following in itertools.pairwise(slices):
        assert duration > 0
        assert (pid, tid) != following[:2] or start + duration <= following[2]


def test_only_the_largest_buffers_are_slices() -> None:
    timeline = many_events(5000)
    sizes = sorted((e["args"]["bytes"] for e in events(timeline, "X") if e["cat"] == "buffer"), reverse=True)
    assert sizes == sorted((b.bytes for b in timeline.buffers), reverse=True)[:MAX_BUFFERS]


def test_tracks_are_named(tmp_path: Path) -> None:
    named = {e["args"]["name"] for e in events(gpt_step(tmp_path), "M") if "name" in e["args"]}
    assert named == {"title", "stages", "largest buffers", "buffers"}
