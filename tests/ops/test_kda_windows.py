"""Tests the windows in which the kernels of KDA take the tokens of a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import memfix
from memfix.checks.interpreter import in_interpreter
from memfix.cuda_kernels.emulated import cannot_emulate, emulated
from memfix.ops.kda import kda, windows
from memfix.ops.kda.arguments import KdaTensors
from memfix.ops.kda.cuda import cuda_kda
from memfix.ops.kda.triton import triton_kda
from memfix.ops.kda.windows import TOKENS_PER_CHUNK, windows_of
from memfix.units import GiB, MiB

WIDTH = 64


def bytes_of_chunk(width: int) -> int:
    """What a chunk of one head counts in a window, in bfloat16."""
    return 2 * (2 * width * width + TOKENS_PER_CHUNK * 7 * width)


def chunks_at_once(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    monkeypatch.setattr(windows, "BYTES_AT_ONCE", number * bytes_of_chunk(WIDTH))


def bounds(part: slice) -> tuple[int, int]:
    return part.start, part.stop


def windows_of_size(
    batch: int, length: int, heads: int, cuts: list[int] | None = None
) -> list[tuple[tuple[int, int], ...]]:
    """The sequences of the batch, tokens and states of each window."""
    rows = torch.empty(batch, length, heads, WIDTH, dtype=torch.bfloat16)
    given = (rows, rows, rows, rows, rows[..., 0])
    tensors = KdaTensors(*given, cu_seqlens=None if cuts is None else torch.tensor(cuts))
    return [(bounds(one.batch), bounds(one.tokens), bounds(one.states)) for one in windows_of(tensors, 64)]


@pytest.mark.parametrize(
    ("batch", "length", "heads", "most", "expected"),
    [
        (2, 100, 2, 16, [((0, 2), (0, 100), (0, 2))]),
        # whole sequences, as many in each window
        (5, 64, 64, 512, [((0, 3), (0, 64), (0, 3)), ((3, 5), (0, 64), (3, 5))]),
        # equal pieces of a sequence that is too long for a window
        (1, 160, 1, 4, [((0, 1), (0, 96), (0, 1)), ((0, 1), (96, 160), (0, 1))]),
        # pieces of all sequences: one after the other, they would leave a GPU idle
        (2, 128, 1, 4, [((0, 2), (0, 64), (0, 2)), ((0, 2), (64, 128), (0, 2))]),
        # of as many sequences as fill a GPU
        (4, 64, 64, 64, [((b, b + 2), (t, t + 32), (b, b + 2)) for b in (0, 2) for t in (0, 32)]),
        # a window has a chunk of one sequence at least
        (1, 64, 300, 1, [((0, 1), (0, 32), (0, 1)), ((0, 1), (32, 64), (0, 1))]),
    ],
)
def test_sequences_of_one_length(
    batch: int, length: int, heads: int, most: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_at_once(monkeypatch, most)
    assert windows_of_size(batch, length, heads) == expected


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([0, 10, 20, 30], [((0, 30), (0, 3))]),
        # short sequences together, longer ones in pieces, and an empty one has a window where nothing else fits
        (
            [0, 40, 50, 180, 180],
            [((0, 50), (0, 2)), ((50, 146), (2, 3)), ((146, 180), (2, 3)), ((180, 180), (3, 4))],
        ),
        ([0, 0, 96], [((0, 96), (0, 2))]),
    ],
)
def test_packed_sequences(cuts: list[int], expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_at_once(monkeypatch, 3)
    assert [window[1:] for window in windows_of_size(1, cuts[-1], 1, cuts)] == expected


def results(form: str, cuts: list[int] | None, has_state: bool, most: int) -> list[torch.Tensor]:
    """Outputs, final states and gradients with at most this many chunks in a window."""
    batch, length, states = (2, 70, 2) if cuts is None else (1, cuts[-1], len(cuts) - 1)
    function, width = (cuda_kda, WIDTH) if form == "cuda" else (triton_kda, 8)
    torch.manual_seed(0)
    q, k, v = torch.randn(3, batch, length, 2, width)
    g, beta, state = -torch.rand(q.shape) / 8, torch.rand(q.shape[:3]), torch.randn(states, 2, width, width)
    given = [q.bfloat16(), k.bfloat16() / 8, v.bfloat16(), g, beta, *([state] if has_state else [])]
    given = [tensor.requires_grad_() for tensor in given]
    with mock.patch.object(windows, "BYTES_AT_ONCE", most * bytes_of_chunk(width)):
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
    for most in (2, 6):
        for one, other in zip(of(most), whole, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("form", ["cuda", "triton"])
def test_a_long_sequence_takes_little_more_than_its_results(form: str) -> None:
    """65,536 tokens of 16 heads, 128 wide. With all chunks in one window, they take 1.34 and 4.07 GiB."""

    def build(device: str, trains: bool) -> Callable[[], object]:
        q, k, v = torch.empty(3, 1, 65_536, 16, 128, dtype=torch.bfloat16, device=device)
        g, beta = torch.empty(q.shape, device=device), torch.empty(q.shape[:3], device=device)
        given = [tensor.requires_grad_(trains) for tensor in (q, k, v, g, beta)]

        def step() -> object:
            out, _ = kda(*given, form=form)
            return torch.autograd.grad(out, given, torch.empty_like(out)) if trains else out

        return step

    results_bytes = 16 * 65_536 * 128 * 2
    forward = memfix.peak(partial(build, trains=False), meter="simulated")
    train = memfix.peak(partial(build, trains=True), meter="simulated")
    assert forward.peak_bytes < results_bytes + 320 * MiB
    assert train.peak_bytes < 7 * results_bytes + GiB  # out and its gradient, and those of q, k, v and, wide, g
