"""Write a timeline for ui.perfetto.dev and chrome://tracing. Both need times, so one event lasts one microsecond."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..meters.timeline import Buffer, Timeline
from ..units import format_bytes
from .bands import Origin, peak_label, phase_spans, printable, was_alive

MAX_BUFFERS = 400

_STEP, _BUFFERS = 1, 2
"""Process numbers. Viewers draw a process as a group of tracks."""


def as_trace(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> bytes:
    """Write the Trace Event Format: a counter of live bytes, and slices for the phases and the largest buffers."""
    alive = [buffer for buffer in timeline.buffers if was_alive(buffer)]
    largest = sorted(sorted(alive, key=lambda b: b.bytes, reverse=True)[:MAX_BUFFERS], key=lambda b: b.born)
    lanes = _lanes(largest, timeline)
    events = [*_counters(timeline), *_phases(timeline), *_slices(timeline, largest, lanes)]
    events.sort(key=lambda event: event["ts"])
    trace = {
        "traceEvents": [*_names(printable(title, 200), max(lanes, default=-1) + 1), *events],
        "otherData": {
            "title": title,
            "peak": peak_label(timeline, capacity_bytes),
            "time": "1 us is one birth or death of a buffer",
        },
    }
    return json.dumps(trace, separators=(",", ":")).encode()


def _names(title: str, num_lanes: int) -> Iterator[dict[str, Any]]:
    yield _metadata("process_name", _STEP, 0, name=title)
    yield _metadata("process_sort_index", _STEP, 0, sort_index=_STEP)
    yield _metadata("thread_name", _STEP, 0, name="stages")
    if num_lanes:
        yield _metadata("process_name", _BUFFERS, 0, name="largest buffers")
        yield _metadata("process_sort_index", _BUFFERS, 0, sort_index=_BUFFERS)
    for lane in range(num_lanes):
        yield _metadata("thread_name", _BUFFERS, lane, name="buffers")
        yield _metadata("thread_sort_index", _BUFFERS, lane, sort_index=lane)


def _metadata(name: str, pid: int, tid: int, /, **args: object) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _counters(timeline: Timeline) -> Iterator[dict[str, Any]]:
    previous = None
    for event, live in enumerate(timeline.live_bytes):
        if live != previous:
            yield {"ph": "C", "name": "live bytes", "pid": _STEP, "tid": 0, "ts": event, "args": {"bytes": live}}
        previous = live


def _phases(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for start, end, name in phase_spans(timeline):
        yield {"ph": "X", "name": name, "cat": "stage", "pid": _STEP, "tid": 0, "ts": start, "dur": end - start}


def _slices(timeline: Timeline, buffers: Iterable[Buffer], lanes: Iterable[int]) -> Iterator[dict[str, Any]]:
    for buffer, lane in zip(buffers, lanes, strict=True):
        origin = Origin.of(buffer)
        yield {
            "ph": "X",
            "name": f"{format_bytes(buffer.bytes)} {origin.label}",
            "cat": "buffer",
            "pid": _BUFFERS,
            "tid": lane,
            "ts": buffer.born,
            "dur": _end(buffer, timeline) - buffer.born,
            "args": {
                "bytes": buffer.bytes,
                "what": printable(buffer.what, 200),
                "place": origin.place,
                "function": origin.function,
                "code": origin.code,
                "stage": buffer.phase,
                "outlives the step": buffer.died is None,
            },
        }


def _lanes(buffers: Iterable[Buffer], timeline: Timeline) -> list[int]:
    """Assign the lowest free track to each buffer, in order of birth, because slices on one track must not overlap."""
    busy: list[tuple[int, int]] = []
    free: list[int] = []
    lanes = []
    for buffer in buffers:
        while busy and busy[0][0] <= buffer.born:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (_end(buffer, timeline), lane))
        lanes.append(lane)
    return lanes


def _end(buffer: Buffer, timeline: Timeline) -> int:
    return timeline.num_events + 1 if buffer.died is None else buffer.died
