"""Cuts a call into windows, which the passes take in turn, and a window into chunks.

Only the terms and states of one window are in memory at a time, so that a long sequence takes little more than its
inputs, outputs and gradients. A window that ends inside its sequences hands their states on to the next.
"""

# B batch, T tokens, H heads, S sequences, N chunks of a window, C tokens of a chunk

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..launches import num_tiles
from .arguments import KdaTensors, Span

TOKENS_PER_CHUNK = 32
"""Longer chunks would save states in backward and steps of the scan, but need products of 64 rows: see
``memfix.ops.kernels.product``."""
BYTES_AT_ONCE = 1 << 30
"""The most that a backward pass keeps of a window. The kernels of an H200 take 6 % longer for four windows of this size
than for one of all chunks, because part of the GPU is idle when a launch ends; for two of twice the size 3 %."""
SCANS_AT_ONCE = 128
"""Sequences of a window, counted once per head, that fill an H200 with scans."""

Widths = tuple[int, int, int]
"""The number of heads, and the widths of keys and of values."""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a window's sequences in order; the sequences are equally long, or packed."""

    num_heads: int
    width_k: int
    width_v: int
    num_sequences: int
    num_chunks: int
    length: int
    """Tokens of each sequence, or 0 if they are packed."""
    stride: int
    """Tokens from the start of a sequence to the start of the next, unless they are packed."""
    chunk_size: int
    """The chunk size that the caller asked for."""
    bounds_N2: torch.Tensor | None = None
    """For packed sequences: the first row of each chunk, and the row behind the last of its sequence."""
    first_chunk_S1: torch.Tensor | None = None
    """For packed sequences: the first chunk of each sequence, then the number of chunks."""

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
    def counts(self) -> tuple[int, ...]:
        """Arguments of every kernel: length, stride and chunks of a sequence (0 if packed), heads, widths."""
        chunks = num_tiles(self.length, TOKENS_PER_CHUNK)
        return self.length, self.stride, chunks, self.num_heads, self.width_k, self.width_v

    @property
    def constants(self) -> dict[str, Any]:
        """Constexprs of every kernel. A width is compiled in if it is a power of two."""
        fixed_k, fixed_v = (width if width & (width - 1) == 0 else 0 for width in (self.width_k, self.width_v))
        return {"FIXED_K": fixed_k, "FIXED_V": fixed_v, "C": TOKENS_PER_CHUNK, "PACKED": self.length == 0}


@dataclass(frozen=True)
class Window:
    """Sequences, or a piece of them, that the passes take together."""

    batch: slice
    tokens: slice
    states: slice
    chunks: Chunks
    begins: bool = True
    """Whether it has the first tokens of its sequences."""
    ends: bool = True
    is_whole: bool = False
    """Whether it has all tokens of the call."""

    def of(self, *tensors_BT: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what the window has of tensors with the axes B and T."""
        if self.is_whole:
            return tensors_BT
        return tuple(tensor_BT[self.batch, self.tokens] for tensor_BT in tensors_BT)

    def states_of(self, states_SHKV: torch.Tensor | None) -> torch.Tensor | None:
        return states_SHKV if states_SHKV is None or self.is_whole else states_SHKV[self.states]

    def empty_states(self, like_SHKV: torch.Tensor) -> torch.Tensor:
        return like_SHKV.new_empty((self.chunks.num_sequences, *like_SHKV.shape[1:]))


def windows_of(tensors: KdaTensors, chunk_size: int) -> tuple[Window, ...]:
    """Return the windows of a call, in order."""
    batch, length, num_heads, width_k = tensors.q_BTHK.shape
    widths = num_heads, width_k, tensors.v_BTHV.shape[3]
    most = max(1, BYTES_AT_ONCE // (_bytes_of_chunk(tensors) * num_heads))
    if len(tensors.spans) == 1:
        return _of_equal(batch, length, widths, most, chunk_size, TOKENS_PER_CHUNK)
    return tuple(_of_packed(tensors, widths, most, chunk_size))


def _bytes_of_chunk(tensors: KdaTensors) -> int:
    """The bytes of a chunk and head in backward: two states, and three terms as wide as keys and four as values."""
    width_k, width_v = tensors.q_BTHK.shape[3], tensors.v_BTHV.shape[3]
    num_elements = 2 * width_k * width_v + TOKENS_PER_CHUNK * (3 * width_k + 4 * width_v)
    return num_elements * tensors.q_BTHK.element_size()


@functools.lru_cache(64)  # this saves the host a tenth of the time in which it starts a forward pass
def _of_equal(
    batch: int, length: int, widths: Widths, most: int, chunk_size: int, chunk_tokens: int
) -> tuple[Window, ...]:
    """Group as many sequences of one length as fit into a window, or cut as many as fill a GPU, if fewer fit."""
    number = _even(batch, max(most // num_tiles(length, chunk_tokens), SCANS_AT_ONCE // widths[0], 1))
    groups = [slice(first, min(first + number, batch)) for first in range(0, batch, number)]
    windows = [
        window
        for group in groups
        for window in _pieces(Span(slice(0, length), group), group, widths, most, chunk_size, length)
    ]
    return tuple(replace(window, is_whole=len(windows) == 1) for window in windows)


def _pieces(span: Span, batch: slice, widths: Widths, most: int, chunk_size: int, stride: int) -> Iterator[Window]:
    """Cut the tokens of sequences that are scanned together."""
    number = span.states.stop - span.states.start
    num_chunks = _even(num_tiles(span.num_tokens, TOKENS_PER_CHUNK), max(1, most // number))
    for piece in span.cut(TOKENS_PER_CHUNK * num_chunks):
        length = piece.stop - piece.start
        chunks = Chunks(*widths, number, number * num_tiles(length, TOKENS_PER_CHUNK), length, stride, chunk_size)
        begins, ends = piece.start == span.tokens.start, piece.stop == span.tokens.stop
        yield Window(batch, piece, span.states, chunks, begins, ends)


def _even(number: int, most: int) -> int:
    """The size of equal parts of ``number`` when it is cut into as few parts of at most ``most`` as possible."""
    return num_tiles(number, num_tiles(number, most))


def _of_packed(tensors: KdaTensors, widths: Widths, most: int, chunk_size: int) -> Iterator[Window]:
    """Group as many packed sequences as fit into a window, and cut a longer one."""
    for group in _groups(tensors.spans, most):
        if len(group) == 1 and group[0].num_tokens:
            yield from _pieces(group[0], slice(0, 1), widths, most, chunk_size, 0)
            continue
        tokens = slice(group[0].tokens.start, group[-1].tokens.stop)
        states = slice(group[0].states.start, group[-1].states.stop)
        chunks = _packed_chunks(group, tokens.start, tensors.q_BTHK.device, widths, chunk_size)
        yield Window(slice(0, 1), tokens, states, chunks, is_whole=len(group) == len(tensors.spans))


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


def _packed_chunks(spans: Sequence[Span], start: int, device: torch.device, widths: Widths, chunk_size: int) -> Chunks:
    """Return the chunks of packed sequences; rows are counted from the token ``start``."""
    bounds, first_chunk = [], [0]
    for span in spans:
        bounds += [(chunk.start - start, span.tokens.stop - start) for chunk in span.cut(TOKENS_PER_CHUNK)]
        first_chunk.append(len(bounds))
    bounds_N2, first_chunk_S1 = (
        torch.tensor(table, device=device, dtype=torch.int64) for table in (bounds, first_chunk)
    )
    return Chunks(*widths, len(spans), len(bounds), 0, 0, chunk_size, bounds_N2, first_chunk_S1)
