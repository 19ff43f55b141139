"""Reads a snapshot of torch's CUDA allocator: the timeline of its history, and the allocation that failed.

The snapshot is the dictionary of ``torch.cuda.memory._snapshot()``, recorded with Python frames. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

from ..units import format_bytes
from .hints import likely_cause
from .timeline import Allocation, Buffer, Line, Timeline, table_lines

Snapshot = Mapping[str, Any]
Frames = Sequence[Mapping[str, Any]]
"""The stack of an allocation, innermost frame first."""

STAGES = "memfix_stages"
"""The key that memfix adds to a snapshot: the stages in the order in which they began, with ``time_us`` and ``name``.

Trace entries have a time too, by which they are assigned to stages. Torch's user metadata of an entry would not do: it
is set per thread, and autograd's threads have none.
"""
BEFORE_WATCH = "existed before the watch"
_PHASES = ("forward", "backward", "optimizer")
_BIRTH, _DEATH, _FAILURE = "alloc", "free_completed", "oom"
# torch's wrapper functions, whose names do not say what allocates
_PLUMBING = {"_call_impl", "_wrapped_call_impl", "decorate_context", "wrapper", "_fn", "inner", "apply", "_use_grad"}


@dataclass(frozen=True)
class Moment:
    """Facts that can be read only while an allocation fails."""

    waiting: Frames = ()
    """The stack of the watched thread, for a failure in one of autograd's threads, which have no Python frames."""
    node: str | None = None
    """The autograd node that is running, such as ``MmBackward0``."""
    capacity_bytes: int = 0
    """The bytes that the process may take: the device's memory, or the share that the program set."""


@dataclass(frozen=True)
class Failure:
    """An allocation that failed, and what was alive at that moment."""

    bytes: int
    """The requested bytes, rounded up by the allocator."""
    free_bytes: int
    """The device's free memory."""
    capacity_bytes: int
    """The bytes that the process may take."""
    live_bytes: int
    unused_bytes: int
    """Bytes that the allocator had reserved and no tensor used."""
    line: Line | None
    alive: tuple[Allocation, ...]
    """All that was alive, including what existed before the step: a row for each origin and line, largest first."""
    cause: str | None
    node: str | None = None
    """The autograd node that was running, such as ``MmBackward0``."""
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """The timeline of the step until the failure, for pictures. JSON leaves it out."""

    def as_dict(self) -> dict[str, Any]:
        """The failure as plain data for JSON, without its timeline."""
        return asdict(replace(self, timeline=None))

    def lines(self, rows: int = 12) -> list[str]:
        """The failure as lines of text."""
        live = f"{format_bytes(self.live_bytes)} of {format_bytes(self.capacity_bytes)} were live"
        free = f"{format_bytes(self.free_bytes)} free on the GPU"
        head = f"{format_bytes(self.bytes)} could not be allocated: {live}, {free}"
        maker = f"  requested by {self.line}" if self.line else "  requested by code without Python frames"
        lines = [head, maker + (f"   (in {self.node})" if self.node else ""), "alive then, largest first"]
        lines += [f"  {line}" for line in table_lines(self.alive, rows)]
        if self.cause:
            lines.append(f"likely cause: {self.cause}")
        if self.unused_bytes >= self.bytes:
            lines.append(
                f"note: {format_bytes(self.unused_bytes)} were reserved but in pieces that did not fit; "
                "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
            )
        return lines


_UNKNOWN = Moment()


def live_addresses(snapshot: Snapshot, device: int) -> frozenset[int]:
    """The addresses of the tensors that are alive on ``device``."""
    return frozenset(block["address"] for block in _live_blocks(snapshot, device))


def timeline_of(snapshot: Snapshot, device: int, before_watch: Collection[int] = ()) -> Timeline:
    """The history of ``device`` as the timeline of a step, in requested bytes.

    Buffers without an ``alloc`` entry existed before the history began. ``before_watch`` are the addresses that were
    live before frames were recorded; any other buffer without frames was made by one of autograd's threads.
    """
    return _History(snapshot, device, before_watch).timeline()


def failure_of(
    snapshot: Snapshot, device: int, before_watch: Collection[int] = (), moment: Moment = _UNKNOWN
) -> Failure | None:
    """The last failed allocation in the history of ``device``; None if none failed."""
    history = _History(snapshot, device, before_watch)
    if history.failed is None:
        return None
    entry, event, stage = history.failed
    timeline = history.timeline().before(event + 1)
    frames = _frames(entry)
    # the phase of the failure decides which rows are "kept for backward", even if nothing was allocated in it yet
    phase = _phase_of_stage(stage) or _phase(frames)
    timeline = replace(timeline, phases=(*timeline.phases, (event, phase)))
    segments = _segments(snapshot, device)
    return Failure(
        bytes=entry["size"],
        free_bytes=entry["device_free"],
        capacity_bytes=moment.capacity_bytes,
        live_bytes=timeline.live_bytes[event],
        unused_bytes=sum(segment["total_size"] - segment["active_size"] for segment in segments),
        line=line_of_frames(frames) or line_of_frames(moment.waiting),
        alive=timeline.rows_at(event, with_base=True),
        cause=likely_cause(timeline.rows_at(event), timeline),
        node=moment.node,
        timeline=timeline,
    )


class _History:
    """The births and deaths of one device's buffers, in the order of the trace."""

    def __init__(self, snapshot: Snapshot, device: int, before_watch: Collection[int]) -> None:
        self._before_watch = before_watch
        self._origins: dict[tuple[int, ...], _Origin] = {}
        self._event = 0
        self._found: list[Buffer] = []
        self._made: list[tuple[int, _Origin, str, int]] = []
        self._died: list[int | None] = []
        self._live: dict[int, int] = {}
        self._phases: list[tuple[int, str]] = []
        self._stages: list[tuple[int, str | None]] = []
        self.failed: tuple[Mapping[str, Any], int, str | None] | None = None
        entered = deque(snapshot.get(STAGES, ()))
        stage = None
        for entry in snapshot["device_traces"][device]:
            while entered and entered[0]["time_us"] < entry["time_us"]:
                stage = entered.popleft()["name"]
            self._read(entry, stage)
        for block in _live_blocks(snapshot, device):
            if block["address"] not in self._live:
                self._existed(block["requested_size"], block["address"], block, None)

    def timeline(self) -> Timeline:
        made = (
            Buffer(size, origin.what, origin.line, phase, born, died)
            for (size, origin, phase, born), died in zip(self._made, self._died, strict=True)
        )
        phases = self._phases or [(0, _PHASES[0])]
        phases[0] = (0, phases[0][1])
        return Timeline((*self._found, *made), self._event, tuple(phases), tuple(self._stages))

    def _read(self, entry: Mapping[str, Any], stage: str | None) -> None:
        action = entry["action"]
        if action == _FAILURE:
            self.failed = (entry, self._event, stage)
        if action not in (_BIRTH, _DEATH):
            return
        self._event += 1
        self._mark(self._stages, stage)
        if action == _BIRTH:
            origin = self._origin(entry)
            phase = _phase_of_stage(stage) or origin.phase
            self._mark(self._phases, phase)
            self._live[entry["addr"]] = len(self._made)
            self._made.append((entry["size"], origin, phase, self._event))
            self._died.append(None)
        elif (index := self._live.pop(entry["addr"], None)) is not None:
            self._died[index] = self._event
        else:  # the entry of a free has the frames of its allocation
            self._existed(entry["size"], entry["addr"], entry, self._event)

    def _existed(self, size: int, address: int, source: Mapping[str, Any], died: int | None) -> None:
        origin = self._origin(source)
        what = BEFORE_WATCH if address in self._before_watch and not _frames(source) else origin.what
        self._found.append(Buffer(size, what, origin.line, "", 0, died))

    def _origin(self, source: Mapping[str, Any]) -> _Origin:
        """The origin of an allocation, cached: allocations with the same stack share the objects of its frames."""
        frames = _frames(source)
        key = tuple(map(id, frames))
        if key not in self._origins:
            self._origins[key] = _Origin(_what(frames), line_of_frames(frames), _phase(frames))
        return self._origins[key]

    def _mark(self, marks: list[Any], name: str | None) -> None:
        if marks[-1][1] != name if marks else name is not None:
            marks.append((self._event, name))


class _Origin(NamedTuple):
    what: str
    line: Line | None
    phase: str


def _segments(snapshot: Snapshot, device: int) -> list[Mapping[str, Any]]:
    return [segment for segment in snapshot["segments"] if segment["device"] == device]


def _live_blocks(snapshot: Snapshot, device: int) -> Iterator[Mapping[str, Any]]:
    for segment in _segments(snapshot, device):
        yield from (block for block in segment["blocks"] if block["state"] != "inactive")


def _frames(entry: Mapping[str, Any]) -> Frames:
    """The frames of an entry or a block; empty for an allocation from before the recording."""
    return entry.get("frames") or ()


def _phase_of_stage(stage: str | None) -> str | None:
    return stage if stage in _PHASES else None


def _phase(frames: Frames) -> str:
    """The phase of an allocation. The stacks of autograd's threads are empty, or begin with a frame of torch."""
    if not frames or _is_torch(frames[-1]) or any(frame["name"] == "_engine_run_backward" for frame in frames):
        return "backward"
    optimizers = os.path.join(_torch_folder(), "optim", "")
    return "optimizer" if any(frame["filename"].startswith(optimizers) for frame in frames) else "forward"


def _what(frames: Frames) -> str:
    """The function of torch that allocated: ``cross_entropy``, ``linear``, ``_multi_tensor_adamw``."""
    if not frames:
        return "made in backward"
    for frame in frames:
        if not _is_torch(frame):
            break
        if frame["name"] == "_init_group":
            return "optimizer state"
        if frame["name"] not in _PLUMBING:
            is_module = frame["name"] == "forward"
            return os.path.basename(frame["filename"]).removesuffix(".py") if is_module else frame["name"]
    return "tensor"


def line_of_frames(frames: Frames) -> Line | None:
    """The innermost line outside torch and the part of memfix that watches."""
    for frame in frames:
        file = frame["filename"]
        if file != "??" and not _is_torch(frame) and not file.startswith(_watching()):
            return Line(file, frame["line"], frame["name"])
    return None


def _is_torch(frame: Mapping[str, Any]) -> bool:
    """Whether the frame is in torch's own code, or in code that its compiler generated."""
    file = frame["filename"]
    return file.startswith((_torch_folder(), "<eval_with_key>")) or f"{os.sep}torchinductor_" in file


@cache
def _torch_folder() -> str:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return os.path.join(os.path.dirname(spec.origin), "")


@cache
def _watching() -> tuple[str, ...]:
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    return tuple(os.path.join(package, room, "") for room in ("meters", "watch", "integrations"))
