"""A recorded snapshot of torch's allocator read back: bytes, lines, phases and the allocation that failed."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import memfix
from memfix.meters.base import Step
from memfix.meters.recorded import STAGES, Moment, failure_of, line_of_frames, live_addresses, timeline_of
from memfix.meters.timeline import Timeline
from memfix.pictures.snapshot import build_snapshot

TORCH = os.path.dirname(torch.__file__)
USER = {"filename": __file__, "line": 41, "name": "step"}
MAIN = {"filename": "/home/me/train.py", "line": 99, "name": "<module>"}
CALL = {"filename": f"{TORCH}/nn/modules/module.py", "line": 1, "name": "_call_impl"}


def of_torch(file: str, name: str) -> dict[str, Any]:
    return {"filename": f"{TORCH}/{file}", "line": 7, "name": name}


class Recording:
    """Entries of a trace, one at a time."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.blocks: dict[int, dict[str, Any]] = {}
        self.stages: list[dict[str, Any]] = []

    def stage(self, name: str | None) -> Recording:
        self.stages.append({"time_us": len(self.entries), "name": name})
        return self

    def alloc(self, address: int, size: int, *frames: dict[str, Any]) -> Recording:
        self._entry(action="alloc", addr=address, size=size, frames=list(frames))
        return self.existed(address, size, *frames)

    def existed(self, address: int, size: int, *frames: dict[str, Any], state: str = "active_allocated") -> Recording:
        self.blocks[address] = {"address": address, "size": 512, "requested_size": size, "state": state,
                                "frames": list(frames)}  # fmt: skip
        return self

    def free(self, address: int, size: int, *frames: dict[str, Any]) -> Recording:
        self.blocks.pop(address, None)
        for action in ("free_requested", "free_completed"):
            self._entry(action=action, addr=address, size=size, frames=list(frames))
        return self

    def oom(self, size: int, *frames: dict[str, Any]) -> Recording:
        self._entry(action="oom", device_free=77, size=size, frames=list(frames))
        return self

    def _entry(self, **fields: Any) -> None:
        self.entries.append({"time_us": len(self.entries) + 1, **fields})

    def snapshot(self, unused: int = 0) -> dict[str, Any]:
        active = sum(block["size"] for block in self.blocks.values())
        mine = {"device": 1, "total_size": active + unused, "active_size": active, "blocks": [*self.blocks.values()]}
        other = {"device": 0, "total_size": 1 << 30, "active_size": 512, "blocks": [
            {"address": 5, "size": 512, "requested_size": 400, "state": "active_allocated", "frames": []}]}  # fmt: skip
        return {"segments": [other, mine], "device_traces": [[], self.entries], STAGES: self.stages}

    def timeline(self, before_watch: tuple[int, ...] = ()) -> Timeline:
        return timeline_of(self.snapshot(), 1, before_watch)


# ---------------------------------------------------------------- a simulated step, written and read
def cross_entropy(device: str) -> Step:
    x = torch.empty(64, 100, device=device, requires_grad=True)
    target = torch.empty(64, dtype=torch.int64, device=device)

    def step() -> None:
        x.grad = None
        doubled = x * 2
        loss = F.cross_entropy(doubled, target)
        loss.backward()

    return step


def test_a_simulated_step_is_read_back_as_it_was_written() -> None:
    written = memfix.peak(cross_entropy).timeline
    assert written is not None
    read = timeline_of(build_snapshot(written), 0)
    assert read.base_bytes == written.base_bytes
    assert max(read.live_bytes) == max(written.live_bytes)
    assert read.live_bytes[-1] == written.live_bytes[-1]
    assert by_line(read) == by_line(written)
    assert any("F.cross_entropy" in code for code in by_line(read))


def by_line(timeline: Timeline) -> dict[str, tuple[int, int]]:
    """Bytes and buffers at the peak by line: the operators are not read back."""
    sums: dict[str, tuple[int, int]] = {}
    for row in timeline.at_peak():
        size, count = sums.get(row.where, (0, 0))
        sums[row.where] = (size + row.bytes, count + row.count)
    return sums


# ---------------------------------------------------------------- births and deaths
def test_buffers_live_from_their_alloc_to_their_completed_free() -> None:
    recording = Recording().existed(10, 100).alloc(20, 30, USER).alloc(30, 5, USER).free(20, 30).alloc(20, 7, USER)
    timeline = recording.timeline()
    assert timeline.live_bytes == (100, 130, 135, 105, 112)
    assert [(b.bytes, b.born, b.died) for b in timeline.buffers] == [
        (100, 0, None),
        (30, 1, 3),
        (5, 2, None),
        (7, 4, None),
    ]


def test_a_free_without_an_alloc_was_there_before_also_where_the_history_lost_its_beginning() -> None:
    timeline = Recording().free(10, 100, of_torch("nn/functional.py", "softmax"), USER).alloc(10, 1, USER).timeline()
    assert (timeline.base_bytes, timeline.live_bytes) == (100, (100, 0, 1))
    assert timeline.buffers[0].what == "softmax"


def test_only_the_asked_device_counts_and_blocks_that_wait_for_a_stream_are_alive() -> None:
    recording = Recording().existed(10, 1).existed(20, 2, state="active_awaiting_free").existed(30, 4, state="inactive")
    assert live_addresses(recording.snapshot(), 1) == {10, 20}
    assert recording.timeline().live_bytes == (3,)


# ---------------------------------------------------------------- what and where
@pytest.mark.parametrize(
    ("frames", "what", "phase"),
    [
        ([USER, MAIN], "tensor", "forward"),
        ([of_torch("nn/functional.py", "cross_entropy"), USER, MAIN], "cross_entropy", "forward"),
        ([of_torch("nn/modules/linear.py", "forward"), CALL, USER, MAIN], "linear", "forward"),
        ([of_torch("optim/adamw.py", "_multi_tensor_adamw"), USER, MAIN], "_multi_tensor_adamw", "optimizer"),
        ([of_torch("optim/adamw.py", "_init_group"), USER, MAIN], "optimizer state", "optimizer"),
        ([], "made in backward", "backward"),
        # a checkpoint that recomputes, in a thread of autograd
        ([USER, of_torch("utils/checkpoint.py", "unpack_hook")], "tensor", "backward"),
        ([USER, of_torch("autograd/graph.py", "_engine_run_backward"), MAIN], "tensor", "backward"),
    ],
)
def test_frames_tell_the_function_and_the_phase(frames: list[dict[str, Any]], what: str, phase: str) -> None:
    (buffer,) = Recording().alloc(10, 1, *frames).timeline().buffers
    assert (buffer.what, buffer.phase) == (what, phase)


def test_the_line_is_the_innermost_outside_torch_its_compiler_and_the_watch() -> None:
    watching = {"filename": memfix.watch.__code__.co_filename, "line": 1, "name": "enter_stage"}
    compiled = {"filename": "/tmp/torchinductor_me/ab/cab.py", "line": 3, "name": "call"}
    line = line_of_frames([watching, compiled, CALL, USER, MAIN])
    assert line is not None
    assert (line.file, line.number, line.function) == (__file__, 41, "step")
    assert line_of_frames([CALL]) is None


def test_a_stage_decides_the_phase_and_gives_the_timeline_its_stretches() -> None:
    recording = Recording().stage("forward").alloc(1, 1, USER, MAIN).stage(None).alloc(2, 1)
    recording.stage("unseen").stage("backward").alloc(3, 1, USER, MAIN)
    timeline = recording.timeline()
    assert [buffer.phase for buffer in timeline.buffers] == ["forward", "backward", "backward"]
    assert timeline.stages == ((1, "forward"), (2, None), (3, "backward"))
    assert timeline.phases == ((0, "forward"), (2, "backward"))


# ---------------------------------------------------------------- failures
def test_a_failure_has_everything_that_was_alive_and_the_line_that_asked() -> None:
    recording = Recording().existed(1, 1000).existed(2, 500, USER, MAIN).existed(9, 50)
    for address in (3, 4, 5):
        recording.alloc(address, 200, of_torch("nn/functional.py", "softmax"), USER, MAIN)
    recording.alloc(6, 40).oom(4096)
    failure = failure_of(recording.snapshot(unused=64), 1, {1}, Moment([CALL, MAIN], "MmBackward0", 8192))
    assert failure is not None
    assert (failure.bytes, failure.free_bytes, failure.live_bytes, failure.unused_bytes) == (4096, 77, 2190, 64)
    assert [(row.bytes, row.what, row.count) for row in failure.alive] == [
        (1000, "existed before the watch", 1),
        (600, "softmax, kept for backward", 3),
        (500, "tensor", 1),  # existed before the step, so nobody knows whether backward needs it
        (90, "made in backward", 2),
    ]
    lines = failure.lines(rows=2)
    assert lines[0] == "4.00 KiB could not be allocated: 2.14 KiB of 8.00 KiB were live, 77 B free on the GPU"
    assert lines[1] == "  requested by train.py:99 in <module>   (in MmBackward0)"
    assert lines[5] == "         590 B  in 2 smaller places"
    assert lines[6].startswith("likely cause: each of 3 passes keeps its softmax for backward")
    assert len(lines) == 7


def test_what_happened_after_the_failure_is_not_told() -> None:
    recording = Recording().alloc(1, 100, USER, MAIN).oom(50, USER, MAIN).free(1, 100).alloc(2, 7, USER, MAIN)
    failure = failure_of(recording.snapshot(), 1, (), Moment())
    assert failure is not None
    assert (failure.live_bytes, [row.bytes for row in failure.alive]) == (100, [100])
    assert failure.alive[0].what == "tensor"  # it failed in the forward, so nothing is kept for backward yet


def test_what_existed_before_the_step_is_not_its_cause() -> None:
    recording = Recording()
    for address in range(8):  # the weights of eight layers, made by one line
        recording.existed(address, 100, USER, MAIN)
    failure = failure_of(recording.oom(5, USER, MAIN).snapshot(), 1)
    assert failure is not None
    assert (failure.alive[0].count, failure.cause) == (8, None)


def test_memory_in_pieces_is_told() -> None:
    failure = failure_of(Recording().oom(50, USER, MAIN).snapshot(unused=60), 1)
    assert failure is not None
    assert failure.lines()[-1] == (
        "note: 60 B were reserved but in pieces that did not fit; "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may help"
    )


def test_a_history_without_a_failure_has_none() -> None:
    assert failure_of(Recording().alloc(1, 1).snapshot(), 1) is None


@pytest.mark.parametrize(
    ("frames", "cause"),
    [
        (
            [of_torch("optim/adamw.py", "_multi_tensor_adamw"), USER, MAIN],
            "the optimizer's foreach form makes temporaries as large as all parameters; fused=True makes none",
        ),
        ([of_torch("optim/adamw.py", "_init_group"), USER, MAIN], None),
    ],
)
def test_hints_know_the_names_of_torch_functions(frames: list[dict[str, Any]], cause: str | None) -> None:
    recording = Recording()
    for address in range(8):
        recording.alloc(address, 10, *frames)
    failure = failure_of(recording.oom(5, *frames).snapshot(), 1)
    assert failure is not None
    assert failure.cause == cause
