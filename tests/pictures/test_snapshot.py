"""The snapshot is what PyTorch's own viewer reads."""

from __future__ import annotations

import itertools
import pickle
import pickletools
import random
from pathlib import Path
from typing import Any

import pytest
from timelines import GiB, MiB, Story, empty, gpt_step, hostile, known_peak, many_events, single_event
from torch.cuda import _memory_viz

from memfix.meters.timeline import Timeline, rounded
from memfix.pictures.snapshot import Addresses, as_snapshot

# what torch/utils/viz/MemoryViz.js can unpickle
VIEWER_OPCODES = set(
    "APPEND APPENDS BINGET BININT BININT1 BININT2 EMPTY_DICT EMPTY_LIST FRAME LONG1 LONG_BINGET MARK MEMOIZE PROTO "
    "SETITEMS SHORT_BINUNICODE STOP TUPLE2 NEWFALSE BINPUT BINUNICODE EMPTY_TUPLE NEWTRUE NONE BINFLOAT TUPLE TUPLE1 "
    "TUPLE3 LONG_BINPUT LIST DICT SETITEM".split()
)


def load(timeline: Timeline) -> dict[str, Any]:
    return pickle.loads(as_snapshot(timeline, "title"))


def live_curve(snapshot: dict[str, Any]) -> list[int]:
    """Live bytes after each entry, as the viewer reckons them: what is freed or left without an alloc was there."""
    entries = [e for e in snapshot["device_traces"][0] if e["action"] in ("alloc", "free_completed")]
    live: dict[int, int] = {}
    before = 0
    curve = [0]
    for entry in entries:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry["size"]
            curve.append(curve[-1] + entry["size"])
        else:
            before += entry["size"] if live.pop(entry["addr"], None) is None else 0
            curve.append(curve[-1] - entry["size"])
    for segment in snapshot["segments"]:
        blocks = [b for b in segment["blocks"] if b["state"] == "active_allocated"]
        before += sum(b["requested_size"] for b in blocks if b["address"] not in live)
    return [before + bytes for bytes in curve]


@pytest.mark.parametrize("make", [empty, single_event, known_peak, hostile, lambda: many_events(2000)])
def test_torch_reads_the_snapshot(make) -> None:
    snapshot = load(make())
    for read in (_memory_viz.segsum, _memory_viz.trace, _memory_viz.trace_plot, _memory_viz.segment_plot):
        assert isinstance(read(snapshot), str)
    for read in (_memory_viz.memory, _memory_viz.segments):
        read(snapshot, format_flamegraph=str)


def test_torch_tells_the_operator_and_the_line() -> None:
    flames = _memory_viz.memory(load(known_peak()), format_flamegraph=str)
    assert f"stream_0;active_allocated;loss.py:41:loss;??:0:mm (forward) {2 * GiB}" in flames
    assert f"stream_0;active_allocated;??:0:existed before (forward) {GiB}" in flames


@pytest.mark.parametrize("make", [empty, single_event, known_peak, hostile, lambda: many_events(2000)])
def test_the_viewer_sees_the_timeline_s_own_curve(make) -> None:
    timeline = make()
    assert live_curve(load(timeline)) == list(timeline.live_bytes)


def test_the_viewer_knows_every_opcode(tmp_path: Path) -> None:
    for timeline in (gpt_step(tmp_path), hostile(), empty()):
        used = {opcode.name for opcode, _, _ in pickletools.genops(as_snapshot(timeline, "title"))}
        assert used <= VIEWER_OPCODES


def test_a_buffer_that_outlives_the_step_is_an_active_block() -> None:
    before, made = load(known_peak())["segments"]
    assert [(b["state"], b["requested_size"]) for b in before["blocks"]] == [("active_allocated", GiB)]
    assert [(b["state"], b["size"]) for b in made["blocks"]] == [("active_allocated", 2 * GiB), ("inactive", 3 * GiB)]


def test_what_existed_before_and_is_freed_has_no_alloc() -> None:
    story = Story()
    old = story.before(3 * MiB)
    story.phase("forward")
    story.drop(old)
    snapshot = load(story.end())
    assert [e["action"] for e in snapshot["device_traces"][0]] == ["free_requested", "free_completed"]
    assert [b["state"] for b in snapshot["segments"][0]["blocks"]] == ["inactive"]


def test_no_two_live_buffers_share_an_address(tmp_path: Path) -> None:
    for timeline in (many_events(2000), gpt_step(tmp_path)):
        snapshot = load(timeline)
        live: dict[int, int] = {}
        for entry in snapshot["device_traces"][0]:
            if entry["action"] == "alloc":
                live[entry["addr"]] = entry["size"]
                spans = sorted(live.items())
                assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
            elif entry["action"] == "free_completed":
                live.pop(entry["addr"], None)


def test_blocks_fill_their_segment_and_numbers_are_exact_in_javascript() -> None:
    for segment in load(many_events(2000))["segments"]:
        addresses = [block["address"] for block in segment["blocks"]]
        ends = [block["address"] + block["size"] for block in segment["blocks"]]
        assert [segment["address"], *ends[:-1]] == addresses
        assert ends[-1] == segment["address"] + segment["total_size"] < 2**53


def test_times_ascend_and_entries_are_not_shared() -> None:
    trace = load(many_events(2000))["device_traces"][0]
    assert [e["time_us"] for e in trace] == sorted(e["time_us"] for e in trace)
    assert len({id(e) for e in trace}) == len(trace), "the viewer writes into the entries"


def test_addresses_are_reused_and_holes_merge() -> None:
    space = Addresses(0)
    first, second, third = (space.take(1000) for _ in range(3))
    space.give_back(first, 1000)
    space.give_back(third, 1000)
    space.give_back(second, 1000)
    assert space.take(3 * rounded(1000)) == 0
    assert space.size == 3 * 1024


def test_random_taking_and_giving_back_ends_as_one_hole() -> None:
    draw = random.Random(0)
    space = Addresses(4096)
    taken: list[tuple[int, int]] = []
    for _ in range(2000):
        if taken and draw.random() < 0.5:
            space.give_back(*taken.pop(draw.randrange(len(taken))))
        else:
            size = draw.randrange(1, 9000)
            taken.append((space.take(size), size))
    for pair in taken:
        space.give_back(*pair)
    assert space.take(space.size) == 4096
