"""``memfix.watch`` on a real GPU: its bytes are those of the prediction, and a failure is told to the line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import memfix
from memfix.meters.base import Step
from memfix.meters.recorded import BEFORE_WATCH
from memfix.meters.stages import stage

MiB = 1 << 20


def train_step(device: str) -> Step:
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 1000)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.ones(512, 256, device=device)
    target = torch.zeros(512, dtype=torch.int64, device=device)

    def step() -> None:
        stage("forward")
        loss = F.cross_entropy(model(x), target)
        stage("backward")
        loss.backward()
        del loss
        stage("optimizer")
        optimizer.step()
        optimizer.zero_grad()
        stage(None)

    return step


@pytest.mark.gpu(use="beside")
def test_a_real_step_takes_the_predicted_bytes_in_every_stage() -> None:
    predicted = memfix.peak(train_step)
    step = train_step("cuda")
    with memfix.watch(predicted=predicted) as watch:
        for _ in range(4):
            step()
            watch.step()
    report = watch.report()
    reading = report.reading
    assert reading is not None
    assert (report.num_steps, report.read_step, report.difference_bytes()) == (4, 2, 0)
    assert reading.notes == ()  # the history and the counters agree
    real = [(s.name, s.peak_bytes - reading.base_bytes) for s in reading.stages]
    assert real == [(s.name, s.peak_bytes - predicted.base_bytes) for s in predicted.stages]
    assert reading.timeline is not None
    assert [name for _, _, name in reading.timeline.stage_spans()] == ["forward", "backward", "optimizer"]
    assert sum(row.bytes for row in reading.alive_at_peak) == reading.peak_bytes
    assert any("F.cross_entropy(model(x), target)" in row.code for row in reading.alive_at_peak)


@pytest.mark.gpu(use="beside")
def test_afterwards_nothing_is_recorded() -> None:
    with memfix.watch() as watch:
        watch.enter_stage("open")
        torch.empty(1, device="cuda")
    assert not torch._C._cuda_isHistoryEnabled()


@contextlib.contextmanager
def capped() -> Iterator[None]:
    """Lets this process take 224 MiB more than it has now."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 224 * MiB) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def forward_then_backward(x: torch.Tensor) -> None:
    y = x.exp()
    z = y.sin()
    z.sum().backward()


@pytest.mark.gpu(use="beside")
def test_a_backward_that_fails_is_told_to_the_line() -> None:
    with capped():
        x = torch.ones(16 * MiB, device="cuda", requires_grad=True)  # 64 MiB
        with pytest.raises(torch.OutOfMemoryError) as caught, memfix.watch() as watch:
            forward_then_backward(x)
    failure = watch.report().failure
    assert failure is not None
    assert failure.bytes == 64 * MiB
    assert failure.node == "SinBackward0"
    assert failure.line is not None
    assert failure.line.text == "z.sum().backward()"
    rows = {(row.what, row.code): row.bytes for row in failure.alive}
    assert rows["tensor, kept for backward", "y = x.exp()"] == 64 * MiB
    assert rows["tensor, kept for backward", "z = y.sin()"] == 64 * MiB
    assert rows[BEFORE_WATCH, ""] >= 64 * MiB
    assert caught.value.__notes__[0].startswith("memfix: out of memory in step 1: 64.00 MiB could not be allocated")


@pytest.mark.gpu(use="beside")
def test_a_forward_that_fails_is_told_to_the_line_and_the_program_may_go_on() -> None:
    heard: list[memfix.WatchReport] = []
    with capped(), memfix.watch(on_failure=heard.append) as watch:
        with pytest.raises(torch.OutOfMemoryError), watch.stage("forward"):
            torch.empty(512 * MiB, dtype=torch.uint8, device="cuda")
        torch.empty(MiB, dtype=torch.uint8, device="cuda")
        watch.step()
    (report,) = heard
    assert report.failure is not None
    assert report.failure.bytes == 512 * MiB
    assert report.failure.line is not None
    assert report.failure.line.text.startswith("torch.empty(512 * MiB")
    assert report.failed_in == "step 1, stage forward"
    assert watch.report().failure is None
