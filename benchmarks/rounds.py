"""Any number of train steps timed in turns, in one process: what disturbs one disturbs the others of its round.

A contender is a function from inputs to a loss. One that runs out of memory, or cannot run here, is a row with
the reason, and the others go on.
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

Inputs = tuple[torch.Tensor, ...]
LossOf = Callable[..., torch.Tensor | None]
"""A loss to run backward from; None where the call was all there is to do, as for a floor."""

LEAST_ROUNDS, FAIR_ROUNDS, MOST_ROUNDS = 2, 3, 10
SECONDS_PER_SIZE = 16.0
SUSTAINED_S = 0.25

# of the device's memory: beyond it the allocator's cache cannot keep the blocks of all contenders at once
CROWDED_SHARE = 0.7


@dataclass
class Row:
    """What one contender showed at one size. Bytes are requested ones, above the inputs."""

    times_s: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """None where nobody counts, as on a CPU."""
    held_bytes: int | None = None
    trouble: str | None = None
    """Why it showed no more: what it asked for when memory ran out, or its error."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def enough_rounds(done: int, here_s: float, left_s: float) -> bool:
    """Whether ``done`` rounds will do, after ``here_s`` seconds at this size and with ``left_s`` left for all sizes."""
    if done < LEAST_ROUNDS:
        return False
    return left_s <= 0 or done >= MOST_ROUNDS or (done >= FAIR_ROUNDS and here_s >= SECONDS_PER_SIZE)


def run_rounds(
    contenders: Mapping[str, LossOf], inputs: Sequence[Inputs], device: str, *, deadline_s: float
) -> dict[str, Row]:
    """Each contender is warmed up and its peak read, then each runs once a round, in an order that rotates.

    ``inputs`` are alike; each round takes the next, so that small ones are not found in a cache. ``deadline_s`` is on
    ``time.perf_counter``: past it no round is added beyond the least.
    """
    rows = {name: Row() for name in contenders}
    for name, loss_of in contenders.items():
        _release(device)
        _attempt(_warm_up, rows[name], device, loss_of, inputs[0])
    crowded = _crowded(rows.values(), device)
    names = [name for name in contenders if rows[name].trouble is None]
    start, done = time.perf_counter(), 0
    while names and not enough_rounds(done, time.perf_counter() - start, deadline_s - time.perf_counter()):
        first = done % len(names)
        now, other = inputs[done % len(inputs)], inputs[(done + 1) % len(inputs)]
        for name in (*names[first:], *names[:first]):
            _attempt(_time_once, rows[name], device, contenders[name], now, other, crowded)
        names = [name for name in names if rows[name].trouble is None]
        done += 1
    return rows


def train(loss_of: LossOf, inputs: Inputs) -> None:
    """One step, forward and backward, with an upstream gradient of 1."""
    loss = loss_of(*inputs)
    if loss is not None:
        loss.backward()


def forget_gradients(inputs: Inputs) -> None:
    for tensor in inputs:
        tensor.grad = None


def trouble_of(error: Exception) -> str:
    """On one line: what was asked for when memory ran out, or the error."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    if isinstance(error, torch.OutOfMemoryError) and asked is not None:
        return f"out of memory, asked for {asked[1]}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _attempt(action: Callable[..., None], row: Row, device: str, *arguments: object) -> None:
    try:
        action(row, device, *arguments)
    except Exception as error:
        row.trouble = trouble_of(error)
    if row.trouble is not None:  # out here the error is gone, and with it the tensors that its frames held
        _release(device)


def _warm_up(row: Row, device: str, loss_of: LossOf, inputs: Inputs) -> None:
    """Two runs: in the first, kernels are compiled and tuned; the second's memory is read."""
    try:
        train(loss_of, inputs)
        forget_gradients(inputs)
        if device == "cpu":
            train(loss_of, inputs)
            return
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_stats()["requested_bytes.all.current"]
        loss = loss_of(*inputs)
        if loss is not None:
            row.held_bytes = torch.cuda.memory_stats()["requested_bytes.all.current"] - base
            loss.backward()
        row.peak_bytes = torch.cuda.memory_stats()["requested_bytes.all.peak"] - base
        torch.cuda.synchronize()  # an error of a kernel is this contender's, not the next one's
    finally:
        forget_gradients(inputs)


def _time_once(row: Row, device: str, loss_of: LossOf, inputs: Inputs, others: Inputs, crowded: bool) -> None:
    try:
        if crowded:  # the blocks that other contenders left do not fit beside its own
            _release(device)
        if device != "cpu":
            _settle(loss_of, others)
        row.times_s.append(_elapsed_s(loss_of, inputs, device))
    finally:
        forget_gradients(inputs)
        forget_gradients(others)


def _settle(loss_of: LossOf, inputs: Inputs) -> None:
    """Untimed steps: the allocator has its blocks, and the GPU's clocks are those of this load, as in training.

    A GPU that has just idled, or done something lighter, is faster until it nears its power limit.
    """
    start = time.perf_counter()
    while True:
        train(loss_of, inputs)
        forget_gradients(inputs)
        torch.cuda.synchronize()
        if time.perf_counter() - start >= SUSTAINED_S:
            return


def _elapsed_s(loss_of: LossOf, inputs: Inputs, device: str) -> float:
    """Of one step, to the end of its kernels."""
    if device == "cpu":
        start = time.perf_counter()
        train(loss_of, inputs)
        return time.perf_counter() - start
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    train(loss_of, inputs)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3


def _crowded(rows: Iterable[Row], device: str) -> bool:
    if device == "cpu":
        return False
    in_all = torch.cuda.memory_allocated() + sum(row.peak_bytes or 0 for row in rows)
    return in_all > CROWDED_SHARE * torch.cuda.mem_get_info()[1]


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
