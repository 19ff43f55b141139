"""Write a timeline in the format of ``torch.cuda.memory._snapshot()``, for docs.pytorch.org/memory_viz.

The viewer needs addresses, which a timeline does not have. This module invents them by best fit, so that no two live
buffers overlap. Sizes, order and source lines are real; the fragmentation that the viewer shows is not.
"""

from __future__ import annotations

import bisect
import pickle
from collections import defaultdict
from typing import Any

from ..meters.timeline import Buffer, Line, Timeline, rounded
from .bands import printable, was_alive

# the viewer reads pickle protocols 2 to 4, and integers as JavaScript doubles, which are exact up to 2**53
_PICKLE_PROTOCOL = 4
_BEFORE_ADDRESS = 0x7F00_0000_0000
_SEGMENT_GAP = 1 << 21


def as_snapshot(timeline: Timeline, title: str, capacity_bytes: int | None = None) -> bytes:
    """The pickled snapshot. The format has no title, so the title is stored under a key that viewers ignore.

    ``capacity_bytes`` is unused, since the format has no place for it.
    """
    return pickle.dumps({**build_snapshot(timeline), "memfix_title": title}, protocol=_PICKLE_PROTOCOL)


def build_snapshot(timeline: Timeline) -> dict[str, Any]:
    """The snapshot with two segments: one for what existed before the step, one that the step allocates at its start.

    As in a real recording, buffers from before the step have no ``alloc`` entry: they are in the blocks of a segment if
    they survive, or in the entry that frees them.
    """
    recording = _Recording([buffer for buffer in timeline.buffers if was_alive(buffer)])
    trace = recording.trace()
    return {
        "segments": [recording.segment(space) for space in (recording.before, recording.during) if space.size],
        "device_traces": [trace],
        "allocator_settings": {},
        "external_annotations": [],
    }


class Addresses:
    """An address range that grows at its end. Allocation takes the smallest hole that fits; adjacent holes merge."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self._holes: list[tuple[int, int]] = []
        self._hole_size_at: dict[int, int] = {}
        self._hole_start_before: dict[int, int] = {}

    @property
    def size(self) -> int:
        return self.end - self.start

    def take(self, num_bytes: int) -> int:
        need = rounded(num_bytes)
        index = bisect.bisect_left(self._holes, (need, 0))
        if index == len(self._holes):
            self.end += need
            return self.end - need
        size, address = self._holes[index]
        self._forget_hole(address, size)
        if size > need:
            self._add_hole(address + need, size - need)
        return address

    def give_back(self, address: int, num_bytes: int) -> None:
        size = rounded(num_bytes)
        if (left := self._hole_start_before.get(address)) is not None:
            self._forget_hole(left, address - left)
            address, size = left, size + address - left
        if (right_size := self._hole_size_at.get(address + size)) is not None:
            self._forget_hole(address + size, right_size)
            size += right_size
        self._add_hole(address, size)

    def _add_hole(self, address: int, size: int) -> None:
        bisect.insort(self._holes, (size, address))
        self._hole_size_at[address] = size
        self._hole_start_before[address + size] = address

    def _forget_hole(self, address: int, size: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (size, address))]
        del self._hole_size_at[address]
        del self._hole_start_before[address + size]


class _Recording:
    """Assigns addresses to the buffers in the order of events."""

    def __init__(self, buffers: list[Buffer]) -> None:
        self.buffers = buffers
        self.before = Addresses(_BEFORE_ADDRESS)
        self.address_of = {i: self.before.take(b.bytes) for i, b in enumerate(buffers) if b.born == 0}
        self.during = Addresses(self.before.end + (-self.before.end) % _SEGMENT_GAP + _SEGMENT_GAP)
        self._frames: dict[tuple[str, str, Line | None], list[dict[str, Any]]] = {}

    def trace(self) -> list[dict[str, Any]]:
        births: defaultdict[int, list[int]] = defaultdict(list)
        deaths: defaultdict[int, list[int]] = defaultdict(list)
        for index, buffer in enumerate(self.buffers):
            if buffer.born > 0:
                births[buffer.born].append(index)
            if buffer.died is not None:
                deaths[buffer.died].append(index)
        entries = []
        for event in sorted(births.keys() | deaths.keys()):
            for index in deaths[event]:
                entries += self._free(index, event)
            entries += [self._alloc(index, event) for index in births[event]]
        # the viewer undoes entries from the last to the second, so the first entry must allocate the blocks' segment
        taken = [_entry("segment_alloc", self.during.start, self.during.size, 0, [])] if self.during.size else []
        return taken + entries

    def segment(self, space: Addresses) -> dict[str, Any]:
        """The segment at the end of the step, with active and inactive blocks that fill it without gaps."""
        blocks: list[dict[str, Any]] = []
        address = space.start
        for taken, index in sorted((self.address_of[i], i) for i, b in enumerate(self.buffers) if b.died is None):
            if not space.start <= taken < space.end:
                continue
            buffer = self.buffers[index]
            blocks += [_block(address, taken - address, 0, "inactive", [])] if taken > address else []
            size = rounded(buffer.bytes)
            blocks.append(_block(taken, size, buffer.bytes, "active_allocated", self._frames_of(buffer)))
            address = taken + size
        blocks += [_block(address, space.end - address, 0, "inactive", [])] if address < space.end else []
        active = sum(block["size"] for block in blocks if block["state"] != "inactive")
        return {
            "device": 0,
            "address": space.start,
            "total_size": space.size,
            "allocated_size": active,
            "active_size": active,
            "requested_size": sum(block["requested_size"] for block in blocks),
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": blocks,
        }

    def _alloc(self, index: int, event: int) -> dict[str, Any]:
        buffer = self.buffers[index]
        self.address_of[index] = self.during.take(buffer.bytes)
        return _entry("alloc", self.address_of[index], buffer.bytes, event, self._frames_of(buffer))

    def _free(self, index: int, event: int) -> list[dict[str, Any]]:
        buffer, address = self.buffers[index], self.address_of[index]
        if buffer.born > 0:
            self.during.give_back(address, buffer.bytes)
        frames = self._frames_of(buffer)
        return [_entry(action, address, buffer.bytes, event, frames) for action in ("free_requested", "free_completed")]

    def _frames_of(self, buffer: Buffer) -> list[dict[str, Any]]:
        """The frames of a buffer. Buffers of one origin share one list, to keep the file small."""
        key = (buffer.what, buffer.phase, buffer.line)
        if key not in self._frames:
            self._frames[key] = _frames(*key)
        return self._frames[key]


def _frames(what: str, phase: str, line: Line | None) -> list[dict[str, Any]]:
    """The operator as a frame without a file, like the C++ frames of a real recording, then the user's line."""
    frames = [{"filename": "??", "line": 0, "name": f"{printable(what, 200)} ({phase})"}]
    return [*frames, {"filename": line.file, "line": line.number, "name": line.function}] if line else frames


def _entry(action: str, address: int, size: int, event: int, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "action": action,
        "addr": address,
        "size": size,
        "stream": 0,
        "time_us": event,
        "compile_context": "N/A",
        "user_metadata": "",
        "pool_id": (0, 0),
        "frames": frames,
    }


def _block(address: int, size: int, requested: int, state: str, frames: list[dict[str, Any]]) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": requested, "state": state, "frames": frames}
