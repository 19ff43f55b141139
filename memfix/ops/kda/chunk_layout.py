"""Lays the tokens of all sequences out in chunks of equal length, and puts chunks back into sequences.

Chunks are ordered by the scan step that visits them: the first chunk of every sequence, then the second of every
sequence that has two, and so on. So a step reads one slice, and the sequences that have not ended come first.
"""

# B batch, T tokens, H heads, S sequences, M chunks, N chunks of a sequence, C rows of a chunk, Z = M x H, X = S x H;
# x is any width

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ..launches import largest_power_of_two, next_power_of_two
from .arguments import Span

MOST_ROWS = 64
"""In longer chunks the ``C x C`` matrices, C numbers per token, cost more than fewer scan steps save."""


def rows_per_chunk(chunk_size: int, longest: int) -> int:
    """The largest power of two that is at most ``chunk_size`` and ``MOST_ROWS``, and no more than ``longest`` needs."""
    return min(largest_power_of_two(min(chunk_size, MOST_ROWS)), next_power_of_two(longest))


@dataclass(frozen=True)
class Packed:
    """Index tables of packed sequences: the token of every row, which rows are padding, and the row of every token."""

    token_of_row: torch.Tensor  # [M * C]
    padding_MC11: torch.Tensor
    row_of_token_T: torch.Tensor
    order_S: torch.Tensor  # sequences by falling number of chunks
    place_S: torch.Tensor  # the index of each sequence in order_S

    @staticmethod
    def of(chunks: Sequence[Span], order: Sequence[int], num_tokens: int, rows: int, device: torch.device) -> Packed:
        row_C = torch.arange(rows, device=device)
        start_M1 = torch.tensor([chunk.tokens.start for chunk in chunks], device=device).unsqueeze(1)
        stop_M1 = torch.tensor([chunk.tokens.stop for chunk in chunks], device=device).unsqueeze(1)
        token_MC = start_M1 + row_C
        padding_MC = token_MC >= stop_M1
        # padding rows point behind the last token, at an entry that is dropped below
        token_MC.masked_fill_(padding_MC, num_tokens)
        row_of_token_T = row_C.new_empty(num_tokens + 1)
        row_of_token_T.scatter_(0, token_MC.flatten(), torch.arange(token_MC.numel(), device=device))
        order_S = torch.tensor(order, device=device)
        return Packed(
            token_MC.masked_fill_(padding_MC, 0).flatten(),
            padding_MC[..., None, None],
            row_of_token_T[:-1],
            order_S,
            order_S.argsort(),
        )


@dataclass(frozen=True)
class Layout:
    """The chunks of one call. The sequences of a batch are equally long; packed ones need the tables in ``packed``."""

    batch: int
    num_sequences: int
    num_tokens: int
    num_heads: int
    rows: int
    num_chunks: int
    steps: list[slice]  # the slice of Z that each scan step visits
    packed: Packed | None

    @staticmethod
    def of(q_BTHK: torch.Tensor, spans: Sequence[Span], chunk_size: int) -> Layout:
        batch, num_tokens, num_heads, _ = q_BTHK.shape
        rows = rows_per_chunk(chunk_size, max(span.num_tokens for span in spans))
        cut = [span.cut(rows) for span in spans]
        order = sorted(range(len(spans)), key=lambda i: -len(cut[i]))
        by_step = [
            [Span(cut[i][step], spans[i].states) for i in order if len(cut[i]) > step]
            for step in range(len(cut[order[0]]))
        ]
        packed = None
        if len(spans) > 1:
            chunks = [chunk for step in by_step for chunk in step]
            packed = Packed.of(chunks, order, num_tokens, rows, q_BTHK.device)
        sizes = [batch * num_heads * len(chunks) for chunks in by_step]
        steps = [slice(stop - size, stop) for stop, size in zip(accumulate(sizes), sizes, strict=True)]
        num_sequences = spans[-1].states.stop
        return Layout(batch, num_sequences, num_tokens, num_heads, rows, steps[-1].stop // num_heads, steps, packed)

    def cut(self, x_BTHx: torch.Tensor, *, out: torch.Tensor) -> None:
        """Copy the tokens to ``out`` as the rows of chunks, ``[Z, C, x]``; padding rows are 0."""
        if self.packed is not None:
            rows_MCHx = out.unflatten(0, (self.num_chunks, -1)).transpose(1, 2)
            taken = x_BTHx[0].index_select(0, self.packed.token_of_row)
            rows_MCHx.copy_(taken.unflatten(0, (self.num_chunks, -1))).masked_fill_(self.packed.padding_MC11, 0)
            return
        rows_BNCHx = self._of_a_batch(out)
        whole, rest = divmod(self.num_tokens, self.rows)
        if whole:
            rows_BNCHx[:, :whole].copy_(x_BTHx[:, : self.num_tokens - rest].unflatten(1, (whole, -1)))
        if rest:
            rows_BNCHx[:, whole, :rest].copy_(x_BTHx[:, self.num_tokens - rest :])
            rows_BNCHx[:, whole, rest:].zero_()

    def joined(self, rows_ZCx: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the rows of chunks as tokens again, ``[B, T, H, x]``."""
        size = (self.batch, self.num_tokens, self.num_heads, rows_ZCx.shape[-1])
        if self.packed is not None:
            rows_MCHx = rows_ZCx.unflatten(0, (self.num_chunks, -1)).transpose(1, 2)
            rows = rows_MCHx.to(dtype).flatten(0, 1)
            return rows.index_select(0, self.packed.row_of_token_T).view(size)
        joined_BTHx = rows_ZCx.new_empty(size, dtype=dtype)
        rows_BNCHx = self._of_a_batch(rows_ZCx)
        whole, rest = divmod(self.num_tokens, self.rows)
        if whole:
            joined_BTHx[:, : self.num_tokens - rest].unflatten(1, (whole, -1)).copy_(rows_BNCHx[:, :whole])
        if rest:
            joined_BTHx[:, self.num_tokens - rest :].copy_(rows_BNCHx[:, whole, :rest])
        return joined_BTHx

    def ordered(self, state_SHKV: torch.Tensor) -> torch.Tensor:
        """Return a copy of the states in the order of the scan, ``[X, K, V]``."""
        if self.packed is None:
            return state_SHKV.clone(memory_format=torch.contiguous_format).flatten(0, 1)
        return state_SHKV.index_select(0, self.packed.order_S).flatten(0, 1)

    def in_place_again(self, state_XKV: torch.Tensor) -> torch.Tensor:
        state_SHKV = state_XKV.unflatten(0, (-1, self.num_heads))
        return state_SHKV if self.packed is None else state_SHKV.index_select(0, self.packed.place_S)

    def _of_a_batch(self, rows_ZCx: torch.Tensor) -> torch.Tensor:
        """Return the rows as ``[B, N, C, H, x]``, a view."""
        return rows_ZCx.unflatten(0, (-1, self.batch, self.num_heads)).permute(1, 0, 3, 2, 4)
