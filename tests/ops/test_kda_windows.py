"""Tests the windows in which the kernels of KDA take the tokens of a call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import memfix
from memfix.checks.interpreter import in_interpreter
from memfix.cuda_kernels.emulated import cannot_emulate, emulated
from memfix.ops.kda import cuda, kda, windows
from memfix.ops.kda.arguments import KdaTensors
from memfix.ops.kda.cuda import cuda_kda
from memfix.ops.kda.triton import triton_kda
from memfix.ops.kda.windows import TOKENS_PER_CHUNK, ForwardWindow, windows_of
from memfix.ops.launches import num_tiles
from memfix.units import MiB

WIDTH = 64


def forward_bytes(width: int) -> int:
    """What a forward pass keeps of a chunk of one head, in bfloat16."""
    return 2 * TOKENS_PER_CHUNK * 4 * width


@contextmanager
def chunks_at_once(number: int, width: int = WIDTH) -> Iterator[None]:
    """A window of a forward pass has at most this many chunks; of these, 64 wide, backward takes a third at a time."""
    with mock.patch.multiple(windows, BYTES_AT_ONCE=number * forward_bytes(width), TIMES_RESULTS=0.0):
        yield


def bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def windows_of_size(
    batch: int, length: int, heads: int, cuts: list[int] | None = None, num_segments: int = 1
) -> tuple[ForwardWindow, ...]:
    rows = torch.empty(batch, length, heads, WIDTH, dtype=torch.bfloat16)
    given = (rows, rows, rows, rows, rows[..., 0])
    tensors = KdaTensors(*given, cu_seqlens=None if cuts is None else torch.tensor(cuts))
    return windows_of(tensors, 64, lambda chunks: num_segments)


@pytest.mark.parametrize(
    ("batch", "length", "heads", "most", "expected"),
    [
        (2, 100, 2, 16, [((0, 100), (0, 2))]),
        # whole sequences, as many in each window
        (5, 64, 64, 640, [((0, 64), (0, 3)), ((0, 64), (3, 5))]),
        # equal pieces of a sequence that is too long for a window
        (1, 160, 1, 4, [((0, 96), (0, 1)), ((96, 160), (0, 1))]),
        # pieces of all sequences: one after the other, they would leave a GPU idle
        (2, 128, 1, 4, [((0, 64), (0, 2)), ((64, 128), (0, 2))]),
        # of as many sequences as fill a GPU
        (4, 64, 64, 64, [((t, t + 32), (b, b + 2)) for b in (0, 2) for t in (0, 32)]),
        # backward takes a chunk of each sequence of a window at least, so short ones are as few as it may take at once
        (300, 32, 128, 300 * 128, [((0, 32), (b, b + 100)) for b in (0, 100, 200)]),
        # a window has a chunk of one sequence at least
        (1, 64, 300, 1, [((0, 32), (0, 1)), ((32, 64), (0, 1))]),
    ],
)
def test_sequences_of_one_length(batch: int, length: int, heads: int, most: int, expected: list[Any]) -> None:
    with chunks_at_once(most):
        found = windows_of_size(batch, length, heads)
    assert [(bounds(one.tokens), bounds(one.states)) for one in found] == expected


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([0, 10, 20, 30], [((0, 30), (0, 3), 1)]),
        # short sequences together, longer ones alone, and an empty one has a window where nothing else fits
        ([0, 40, 50, 180, 180], [((0, 50), (0, 2), 1), ((50, 180), (2, 3), 2), ((180, 180), (3, 4), 1)]),
        ([0, 0, 96], [((0, 96), (0, 2), 1)]),
        ([0, 400, 401], [((0, 224), (0, 1), 3), ((224, 400), (0, 1), 2), ((400, 401), (1, 2), 1)]),
    ],
)
def test_packed_sequences(cuts: list[int], expected: list[Any]) -> None:
    with chunks_at_once(9):
        found = windows_of_size(1, cuts[-1], 1, cuts)
    assert [(bounds(one.tokens), bounds(one.states), len(one.parts)) for one in found] == expected


@pytest.mark.parametrize("num_segments", [1, 2, 3])
@pytest.mark.parametrize("most", [3, 7, 20, 1000])
def test_backward_begins_with_states_that_forward_keeps(most: int, num_segments: int) -> None:
    """The kernel of a forward pass keeps the states that cut a window into equal pieces."""
    for length in range(1, 40 * TOKENS_PER_CHUNK, 21):
        with chunks_at_once(most):
            found = windows_of_size(1, length, 1, num_segments=num_segments)
        for window in found:
            number = sum(part.chunks.num_segments for part in window.parts)
            apart = TOKENS_PER_CHUNK * num_tiles(window.chunks.num_chunks, number)
            kept = [*range(window.tokens.start, window.tokens.stop, apart)]
            begun = [
                part.tokens.start + TOKENS_PER_CHUNK * part.chunks.segment_chunks * segment
                for part in window.parts
                for segment in range(part.chunks.num_segments)
            ]
            assert kept == begun
            states = torch.arange(1, number)
            for part, first, inner in window.parts_with_states(torch.tensor(0), states if number > 1 else None):
                assert first is not None
                at = [int(first), *([] if inner is None else inner.tolist())]
                assert at == [begun.index(part.tokens.start) + segment for segment in range(part.chunks.num_segments)]
        assert [window.tokens.start for window in found] == [0, *(window.tokens.stop for window in found[:-1])]
        assert found[-1].tokens.stop == length


@pytest.mark.parametrize(
    ("shape", "forward", "backward"),
    [((1, 8192, 32), 1, 3), ((4, 4096, 16), 1, 3), ((1, 65_536, 16), 3, 3), ((16, 256, 8), 1, 1)],
)
def test_a_large_call_has_few_windows(shape: tuple[int, int, int], forward: int, backward: int) -> None:
    q = torch.empty(*shape, 128, dtype=torch.bfloat16, device="meta")
    tensors = KdaTensors(q, q, q, q.float(), q[..., 0])
    found = windows_of(tensors, 64, cuda._PASSES.num_segments)
    assert (len(found), sum(len(window.parts) for window in found)) == (forward, backward)


def results(form: str, cuts: list[int] | None, has_state: bool, most: int) -> list[torch.Tensor]:
    """Outputs, final states and gradients with at most this many chunks in a window."""
    batch, length, states = (2, 70, 2) if cuts is None else (1, cuts[-1], len(cuts) - 1)
    function, width = (cuda_kda, WIDTH) if form == "cuda" else (triton_kda, 8)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, length, 2, width)
    g, beta, state = -torch.rand(q.shape) / 8, torch.rand(q.shape[:3]), torch.randn(states, 2, width, width)
    given = [q.bfloat16(), k.bfloat16() / 8, v.bfloat16(), g, beta, *([state] if has_state else [])]
    given = [tensor.requires_grad_() for tensor in given]
    with chunks_at_once(most, width):
        options = {"cu_seqlens": None if cuts is None else torch.tensor(cuts), "chunk_size": 8}
        found = function(*given, **options)
        upstream = [torch.linspace(-1, 1, one.numel()).view(one.shape).to(one.dtype) for one in found]
        return [*(one.detach() for one in found), *torch.autograd.grad(found, given, upstream)]


@pytest.mark.parametrize("cuts", [None, [0, 0, 20, 150, 150]], ids=["batch", "packed"])
@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_results_are_those_of_one_window(form: str, cuts: list[int] | None, has_state: bool) -> None:
    if form == "cuda" and (reason := cannot_emulate()):
        pytest.skip(str(reason))

    def of(most: int) -> list[torch.Tensor]:
        if form == "triton":
            return in_interpreter(partial(results, form, cuts, has_state, most))
        with emulated():
            return results(form, cuts, has_state, most)

    whole = of(1000)
    for most in (6, 16):
        for one, other in zip(of(most), whole, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("shape", "forward_mib", "train_mib"),
    [((1, 65_536, 16), 656, 2800), ((1, 8192, 32), 360, 716), ((4, 4096, 16), 360, 716)],
)
@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_a_large_call_takes_little_more_than_its_results(
    form: str, shape: tuple[int, int, int], forward_mib: int, train_mib: int
) -> None:
    """With all chunks in one window and part they take 1.34 and 4.07 GiB, and 0.34 and 1.02 GiB."""
    assert peak_bytes(form, shape, trains=False) < forward_mib * MiB
    assert peak_bytes(form, shape, trains=True) < train_mib * MiB


@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_forward_stores_states_for_backward_only_if_there_is_one(form: str) -> None:
    with mock.patch.object(ForwardWindow, "empty_inner", side_effect=RuntimeError("allocated")):
        peak_bytes(form, (1, 8192, 32), trains=False)
        with pytest.raises(RuntimeError, match="allocated"):
            peak_bytes(form, (1, 8192, 32), trains=True)


def peak_bytes(form: str, shape: tuple[int, int, int], *, trains: bool) -> int:
    def build(device: str) -> Callable[[], object]:
        q, k, v = torch.empty(3, *shape, 128, dtype=torch.bfloat16, device=device)
        g, beta = torch.empty(q.shape, device=device), torch.empty(q.shape[:3], device=device)
        given, upstream = [tensor.requires_grad_() for tensor in (q, k, v, g, beta)], torch.empty_like(q)

        def step() -> object:
            with torch.set_grad_enabled(trains):
                out, _ = kda(*given, form=form)
            return torch.autograd.grad(out, given, upstream) if trains else out

        return step

    return memfix.peak(build, meter="simulated").peak_bytes
