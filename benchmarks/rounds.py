"""Any number of train steps timed in turns, in one process: what disturbs one disturbs the others of its round.

A contender is a function from inputs to a loss, or to a result whose upstream gradient is given. One that runs out of
memory, or cannot run here, is a row with the reason, and the others go on.
"""

from __future__ import annotations

import gc
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from memfix.units import MiB

Inputs = tuple[torch.Tensor, ...]
LossOf = Callable[..., torch.Tensor | None]
"""A loss to run backward from; None where the call was all there is to do, as for a floor."""

LEAST_ROUNDS, FAIR_ROUNDS, MOST_ROUNDS = 2, 3, 10
SECONDS_PER_SIZE = 16.0
SUSTAINED_S = 0.25
ROTATED_BYTES, MOST_COPIES = 256 * MiB, 8  # several times what a GPU's L2 cache holds

# of the device's memory: beyond it the allocator's cache cannot keep the blocks of all contenders at once
CROWDED_SHARE = 0.7


@dataclass(frozen=True)
class Limits:
    """How many rounds: ``least`` always, ``fair`` even where they take longer than ``seconds``, ``most`` at most."""

    least: int = LEAST_ROUNDS
    fair: int = FAIR_ROUNDS
    most: int = MOST_ROUNDS
    seconds: float = SECONDS_PER_SIZE


USUAL_LIMITS = Limits()


@dataclass
class Row:
    """What one contender showed at one size. Bytes are requested ones, above the inputs."""

    times_s: list[float] = field(default_factory=list)
    """Of one step each."""
    batch_steps: int = 1
    """How many consecutive steps the last of the times is the mean of."""
    peak_bytes: int | None = None
    """None where nobody counts, as on a CPU."""
    allocated_bytes: int | None = None
    """The same peak in the allocator's blocks, which are rounded up."""
    held_bytes: int | None = None
    trouble: str | None = None
    """Why it showed no more: what it asked for when memory ran out, or its error."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


def enough_rounds(done: int, here_s: float, left_s: float, limits: Limits = USUAL_LIMITS) -> bool:
    """Whether ``done`` rounds will do, after ``here_s`` seconds at this size and with ``left_s`` left for all sizes."""
    if done < limits.least:
        return False
    return left_s <= 0 or done >= limits.most or (done >= limits.fair and here_s >= limits.seconds)


def inputs_to_rotate(make: Callable[[int], Inputs]) -> list[Inputs]:
    """As many as a cache cannot hold, from ``make`` of a seed; one alone where that is large."""
    first = make(0)
    copies = min(ROTATED_BYTES // sum(tensor.nbytes for tensor in first), MOST_COPIES)
    return [first, *(make(seed) for seed in range(1, copies))]


def run_rounds(
    contenders: Mapping[str, LossOf],
    inputs: Sequence[Inputs],
    device: str,
    *,
    deadline_s: float,
    limits: Limits = USUAL_LIMITS,
    upstream: torch.Tensor | None = None,
    batch_s: float = 0.0,
) -> dict[str, Row]:
    """Each contender is warmed up and its peak read, then each is timed once a round, in an order that rotates.

    ``inputs`` are alike; each step takes the next, so that small ones are not found in a cache. ``deadline_s`` is on
    ``time.perf_counter``: past it no round is added beyond the least.

    On a GPU a time is that of a lone step, or with ``batch_s`` the mean over as many consecutive steps as take that
    long: the next is launched while the last one runs, as in a training loop. ``upstream`` is the gradient at the
    result, where that is not a loss.
    """
    rows = {name: Row() for name in contenders}
    steps = {name: _Step(loss_of, upstream, device) for name, loss_of in contenders.items()}
    for name, step in steps.items():
        _release(device)
        _attempt(_warm_up, rows[name], step, inputs[0])
    crowded = _crowded(rows.values(), device)
    names = [name for name in contenders if rows[name].trouble is None]
    start, done = time.perf_counter(), 0
    while names and not enough_rounds(done, time.perf_counter() - start, deadline_s - time.perf_counter(), limits):
        first, now = done % len(names), done % len(inputs)
        in_turn = (*inputs[now:], *inputs[:now])
        for name in (*names[first:], *names[:first]):
            _attempt(_time_once, rows[name], steps[name], in_turn, batch_s, crowded)
        names = [name for name in names if rows[name].trouble is None]
        done += 1
    return rows


def train(loss_of: LossOf, inputs: Inputs, upstream: torch.Tensor | None = None) -> None:
    """One step, forward and backward, with ``upstream`` as the gradient at the result: 1 for a loss."""
    result = loss_of(*inputs)
    if result is not None:
        result.backward(upstream)


def forget_gradients(inputs: Inputs) -> None:
    for tensor in inputs:
        tensor.grad = None


def trouble_of(error: Exception) -> str:
    """On one line: what was asked for when memory ran out, or the error."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    if isinstance(error, torch.OutOfMemoryError) and asked is not None:
        return f"out of memory, asked for {asked[1]}"
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@dataclass(frozen=True)
class _Step:
    loss_of: LossOf
    upstream: torch.Tensor | None
    device: str

    def __call__(self, inputs: Inputs) -> None:
        """As a training loop does it: old gradients are dropped, new ones are made."""
        forget_gradients(inputs)
        train(self.loss_of, inputs, self.upstream)


def _attempt(action: Callable[..., None], row: Row, step: _Step, *arguments: object) -> None:
    try:
        action(row, step, *arguments)
    except Exception as error:
        row.trouble = trouble_of(error)
    if row.trouble is not None:  # out here the error is gone, and with it the tensors that its frames held
        _release(step.device)


def _warm_up(row: Row, step: _Step, inputs: Inputs) -> None:
    """Two runs: in the first, kernels are compiled and tuned; the second's memory is read."""
    try:
        step(inputs)
        forget_gradients(inputs)
        if step.device == "cpu":
            step(inputs)
            return
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()
        result = step.loss_of(*inputs)
        if result is not None:
            row.held_bytes = _above(before, torch.cuda.memory_stats(), "requested_bytes", "current")
            result.backward(step.upstream)
        after = torch.cuda.memory_stats()
        row.peak_bytes = _above(before, after, "requested_bytes", "peak")
        row.allocated_bytes = _above(before, after, "allocated_bytes", "peak")
        torch.cuda.synchronize()  # an error of a kernel is this contender's, not the next one's
    finally:
        forget_gradients(inputs)


def _above(before: Mapping[str, int], after: Mapping[str, int], count: str, point: str) -> int:
    return after[f"{count}.all.{point}"] - before[f"{count}.all.current"]


def _time_once(row: Row, step: _Step, inputs: Sequence[Inputs], batch_s: float, crowded: bool) -> None:
    try:
        if crowded:  # the blocks that other contenders left do not fit beside its own
            _release(step.device)
        if step.device != "cpu":
            row.batch_steps = max(1, math.ceil(batch_s / _settle(step, inputs[1 % len(inputs)])))
        row.times_s.append(_elapsed_s(step, inputs, row.batch_steps))
    finally:
        for each in inputs:
            forget_gradients(each)


def _settle(step: _Step, inputs: Inputs) -> float:
    """Untimed steps: the allocator has its blocks, and the GPU's clocks are those of this load, as in training.

    A GPU that has just idled, or done something lighter, is faster until it nears its power limit.
    Returns the seconds of the shortest.
    """
    start = time.perf_counter()
    shortest_s, before = math.inf, start
    while True:
        step(inputs)
        torch.cuda.synchronize()
        now = time.perf_counter()
        shortest_s, before = min(shortest_s, now - before), now
        if now - start >= SUSTAINED_S:
            forget_gradients(inputs)
            return shortest_s


def _elapsed_s(step: _Step, inputs: Sequence[Inputs], steps: int) -> float:
    """Of one step, to the end of its kernels; the mean of ``steps`` in a row, each on the next of ``inputs``."""
    in_turn = itertools.islice(itertools.cycle(inputs), steps)
    if step.device == "cpu":
        start = time.perf_counter()
        for each in in_turn:
            step(each)
        return (time.perf_counter() - start) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    for each in in_turn:
        step(each)
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3 / steps


def _crowded(rows: Iterable[Row], device: str) -> bool:
    if device == "cpu":
        return False
    in_all = torch.cuda.memory_allocated() + sum(row.peak_bytes or 0 for row in rows)
    return in_all > CROWDED_SHARE * torch.cuda.mem_get_info()[1]


def _release(device: str) -> None:
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()
