"""Cuts a call into windows, which the passes take in turn, and a window into chunks.

Only the terms and states of one window are in memory at a time, so that a call takes little more than its inputs,
outputs and gradients. A window that ends inside its sequences hands their states on to the next. Backward keeps about
three times as many bytes of a chunk as forward, so it takes a window of forward in parts.
"""

# B batch, T tokens, H heads, S sequences, N chunks of a window, C tokens of a chunk

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..launches import num_tiles
from .arguments import KdaTensors, Span

TOKENS_PER_CHUNK = 32
"""Longer chunks would save states in backward and steps of the scan, but need products of 64 rows: see
``memfix.ops.kernels.product``."""
BYTES_AT_ONCE = 384 << 20
"""The most that a window keeps, unless its results take more: smaller windows slow an H200 down, because part of it is
idle when a launch ends."""
TIMES_RESULTS = 1.0
"""The most that a window keeps in multiples of the results of the whole call, which are in memory anyway: the outputs,
and in backward also the gradients."""
SCANS_AT_ONCE = 128
"""Sequences of a window, counted once per head, that fill an H200 with scans."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a window's sequences in order; the sequences are equally long, or packed."""

    num_heads: int
    width_k: int
    width_v: int
    num_sequences: int
    num_chunks: int
    start_row: int
    """The row, of all B*T, of the first token, unless the sequences are packed."""
    length: int
    """Tokens of each sequence, or 0 if they are packed."""
    stride: int
    """Rows from the start of a sequence to the start of the next, unless they are packed."""
    chunk_size: int
    """The chunk size that the caller asked for."""
    bounds_N2: torch.Tensor | None = None
    """For packed sequences: the first row of each chunk, and the row behind the last of its sequence."""
    first_chunk_S1: torch.Tensor | None = None
    """For packed sequences: the first chunk of each sequence, then the number of chunks."""
    num_segments: int = 1
    """Segments of each sequence that backward scans in parallel. Forward keeps the state with which each begins."""
    segment_chunks: int = 0
    """Chunks of every segment but the last, or 0: each sequence is cut into equal segments."""

    def empty_rows(self, like: torch.Tensor, width: int) -> torch.Tensor:
        """Allocate a row of ``width`` for each token of every chunk and head."""
        return self.empty(like, TOKENS_PER_CHUNK, width)

    def empty_pairs(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate a number for each pair of tokens of every chunk and head."""
        return self.empty_rows(like, TOKENS_PER_CHUNK)

    def empty(self, like: torch.Tensor, *size: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Allocate a tensor of ``size`` for every chunk and head."""
        return like.new_empty((self.num_chunks, self.num_heads, *size), dtype=dtype)

    @property
    def places(self) -> tuple[int, ...]:
        """Arguments of every kernel: the first row, and a sequence's length, stride, chunks (0 if packed) and heads."""
        return self.start_row, self.length, self.stride, num_tiles(self.length, TOKENS_PER_CHUNK), self.num_heads

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs of every kernel. A width is compiled in if it is a power of two."""
        fixed_k, fixed_v = (width if width & (width - 1) == 0 else 0 for width in (self.width_k, self.width_v))
        return {"FIXED_K": fixed_k, "FIXED_V": fixed_v, "C": TOKENS_PER_CHUNK, "PACKED": self.length == 0}


@dataclass(frozen=True)
class Window:
    """Sequences, or a piece of them, that a pass takes together."""

    tokens: slice
    states: slice
    chunks: Chunks
    begins: bool = True
    """Whether it has the first tokens of its sequences."""
    ends: bool = True

    def states_of(self, states_SHKV: torch.Tensor | None) -> torch.Tensor | None:
        return None if states_SHKV is None else states_SHKV[self.states]

    def empty_states(self, like_SHKV: torch.Tensor, *sizes: int) -> torch.Tensor:
        return like_SHKV.new_empty((*sizes, self.chunks.num_sequences, *like_SHKV.shape[1:]))


@dataclass(frozen=True)
class ForwardWindow(Window):
    """A window of a forward pass."""

    parts: tuple[Window, ...] = ()
    """What backward takes of it at a time, in order."""

    def empty_inner(self, like_SHKV: torch.Tensor) -> torch.Tensor | None:
        """Allocate the states with which backward's segments begin, without that of the first."""
        number = sum(part.chunks.num_segments for part in self.parts)
        return self.empty_states(like_SHKV, number - 1) if number > 1 else None

    def parts_with_states(
        self, first_SHKV: torch.Tensor | None, inner_GSHKV: torch.Tensor | None
    ) -> Iterator[tuple[Window, torch.Tensor | None, torch.Tensor | None]]:
        """Yield each part with its first state, and those with which its further segments begin."""
        firsts = [first_SHKV, *(() if inner_GSHKV is None else inner_GSHKV)]
        at = 0
        for part in self.parts:
            end = at + part.chunks.num_segments
            yield part, firsts[at], inner_GSHKV[at : end - 1] if inner_GSHKV is not None and end > at + 1 else None
            at = end


@dataclass(frozen=True)
class Limits:
    """How large the windows of a call may be, and what all of its chunks have in common."""

    widths: tuple[int, int, int]
    """The number of heads, and the widths of keys and of values."""
    forward: int
    """The most chunks of a window, each with all heads."""
    backward: int
    chunk_size: int
    num_segments: Callable[[Chunks], int]
    """In how many segments backward scans each sequence of these chunks."""

    @staticmethod
    def of(tensors: KdaTensors, chunk_size: int, num_segments: Callable[[Chunks], int]) -> Limits:
        (*rows, num_heads, width_k), width_v = tensors.q_BTHK.shape, tensors.v_BTHV.shape[3]
        item_bytes, gate_bytes = tensors.q_BTHK.element_size(), tensors.g_BTHK.element_size()
        tokens = math.prod(rows) * num_heads
        out_bytes = tokens * width_v * item_bytes
        gradients_bytes = tokens * ((2 * width_k + width_v) * item_bytes + width_k * gate_bytes)
        terms = TOKENS_PER_CHUNK * (3 * width_k + width_v)
        terms_and_states = TOKENS_PER_CHUNK * (3 * width_k + 4 * width_v) + 2 * width_k * width_v

        def most(results_bytes: int, num_elements: int) -> int:
            at_once = max(BYTES_AT_ONCE, int(TIMES_RESULTS * results_bytes))
            return max(1, at_once // (num_elements * item_bytes * num_heads))

        forward, backward = most(out_bytes, terms), most(out_bytes + gradients_bytes, terms_and_states)
        return Limits((num_heads, width_k, width_v), forward, backward, chunk_size, num_segments)

    def chunks(self, tokens: slice, states: slice, stride: int) -> Chunks:
        """The chunks of these tokens of sequences that are equally long."""
        number, length = states.stop - states.start, tokens.stop - tokens.start
        start_row, num_chunks = states.start * stride + tokens.start, number * num_tiles(length, TOKENS_PER_CHUNK)
        return Chunks(*self.widths, number, num_chunks, start_row, length, stride, self.chunk_size)


def windows_of(
    tensors: KdaTensors, chunk_size: int, num_segments: Callable[[Chunks], int]
) -> tuple[ForwardWindow, ...]:
    """Return the windows of a call, in order."""
    limits = Limits.of(tensors, chunk_size, num_segments)
    if len(tensors.spans) == 1:
        return _of_equal(*tensors.q_BTHK.shape[:2], limits, TOKENS_PER_CHUNK)
    return tuple(_of_packed(tensors, limits))


@functools.lru_cache(64)  # this saves the host a tenth of the time in which it starts a forward pass
def _of_equal(batch: int, length: int, limits: Limits, chunk_tokens: int) -> tuple[ForwardWindow, ...]:
    """Group as many sequences of one length as fit into a window, or cut as many as fill a GPU, if fewer fit. A part
    has a chunk of each sequence at least."""
    fit = min(limits.forward // num_tiles(length, chunk_tokens), limits.backward)
    number = _even(batch, max(fit, SCANS_AT_ONCE // limits.widths[0], 1))
    groups = (slice(first, min(first + number, batch)) for first in range(0, batch, number))
    return tuple(window for group in groups for window in _pieces(Span(slice(0, length), group), limits, length))


def _of_packed(tensors: KdaTensors, limits: Limits) -> Iterator[ForwardWindow]:
    """Group as many packed sequences as fit into a window, and cut a longer one."""
    for group in _groups(tensors.spans, min(limits.forward, limits.backward)):
        if len(group) == 1 and group[0].num_tokens:
            yield from _pieces(group[0], limits, 0)
            continue
        tokens = slice(group[0].tokens.start, group[-1].tokens.stop)
        states = slice(group[0].states.start, group[-1].states.stop)
        window = Window(tokens, states, _packed_chunks(group, tensors.q_BTHK.device, limits))
        yield ForwardWindow(**vars(window), parts=(window,))


def _pieces(span: Span, limits: Limits, stride: int) -> Iterator[ForwardWindow]:
    """Cut the tokens of equally long sequences into windows, and these into parts."""
    whole = Window(span.tokens, span.states, limits.chunks(span.tokens, span.states, stride))
    for piece in _cut(whole, _even_size(whole, limits.forward), limits):
        yield ForwardWindow(**vars(piece), parts=tuple(_parts(piece, limits)))


def _parts(window: Window, limits: Limits) -> Iterator[Window]:
    size = _even_size(window, limits.backward)
    num_segments = limits.num_segments(next(_cut(window, size, limits)).chunks)
    segment = num_tiles(size, num_segments)
    for part in _cut(window, segment * num_segments, limits):
        num_segments = num_tiles(part.chunks.num_chunks // part.chunks.num_sequences, segment)
        yield replace(part, chunks=replace(part.chunks, num_segments=num_segments, segment_chunks=segment))


def _cut(window: Window, num_chunks: int, limits: Limits) -> Iterator[Window]:
    """Cut the tokens of equally long sequences after every ``num_chunks`` chunks."""
    whole, states = window.tokens, window.states
    for tokens in Span(whole, states).cut(TOKENS_PER_CHUNK * num_chunks):
        begins, ends = window.begins and tokens.start == whole.start, window.ends and tokens.stop == whole.stop
        yield Window(tokens, states, limits.chunks(tokens, states, window.chunks.stride), begins, ends)


def _even_size(window: Window, most: int) -> int:
    """The chunks of each sequence in a piece when a window is cut into as few even pieces of ``most`` as possible."""
    number = window.chunks.num_sequences
    return _even(window.chunks.num_chunks // number, max(1, most // number))


def _even(number: int, most: int) -> int:
    """The size of equal parts of ``number`` when it is cut into as few parts of at most ``most`` as possible."""
    return num_tiles(number, num_tiles(number, most))


def _groups(spans: Sequence[Span], most: int) -> Iterator[list[Span]]:
    """Yield as many packed sequences as fit into a window, or a longer one by itself."""
    group: list[Span] = []
    free = most
    for span in spans:
        num_chunks = num_tiles(span.num_tokens, TOKENS_PER_CHUNK)
        if group and num_chunks > free:
            yield group
            group, free = [], most
        group.append(span)
        free -= num_chunks
    yield group


def _packed_chunks(spans: Sequence[Span], device: torch.device, limits: Limits) -> Chunks:
    bounds, first_chunk = [], [0]
    for span in spans:
        bounds += [(chunk.start, span.tokens.stop) for chunk in span.cut(TOKENS_PER_CHUNK)]
        first_chunk.append(len(bounds))
    bounds_N2, first_chunk_S1 = (
        torch.tensor(table, device=device, dtype=torch.int64) for table in (bounds, first_chunk)
    )
    chunks = Chunks(*limits.widths, len(spans), len(bounds), 0, 0, 0, limits.chunk_size, bounds_N2, first_chunk_S1)
    return replace(chunks, num_segments=limits.num_segments(chunks))
