"""The number of rows of a chunk: as many as fit a given number of bytes, or a default that suits the step."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...units import format_bytes, parse_bytes
from ..products import autocast_dtype
from .options import FEW_LOGITS, ROWS_PER_CHUNK, Options
from .recompute import TiledPass
from .triton import ExponentialsPass

_MULTIPLE = 128  # the rows of a tile of a matrix product


def require_one_bound(rows_per_chunk: int | None, max_bytes: int | str | None) -> None:
    """Refuse two bounds of a chunk at once: its rows and its bytes."""
    if rows_per_chunk is not None and max_bytes is not None:
        raise ValueError(f"give rows_per_chunk or max_bytes, not both; got {rows_per_chunk} and {max_bytes!r}")


def product_dtype(hidden: torch.Tensor) -> torch.dtype:
    """Return the dtype of the logits' operands: that of ``hidden``, or autocast's."""
    return autocast_dtype(hidden) or hidden.dtype


def usual_rows(num_tokens: int, vocabulary: int) -> int:
    """Return the default rows of a chunk: the fewest chunks of equal size with ``ROWS_PER_CHUNK`` rows at most, or up
    to twice as many rows as long as a chunk has ``FEW_LOGITS`` logits at most.

    Sizes are equal because a short last chunk would read and write the gradient of the weight for a few rows.
    """
    most_rows = max(ROWS_PER_CHUNK, min(2 * ROWS_PER_CHUNK, FEW_LOGITS // vocabulary))
    num_chunks = max(1, -(-num_tokens // most_rows))
    rows = max(1, -(-num_tokens // num_chunks))
    return -(-rows // _MULTIPLE) * _MULTIPLE


@dataclass(frozen=True)
class ChunkMemory:
    """The properties of a call that decide, with the number of rows, the bytes of a chunk."""

    form: str
    width: int
    vocabulary: int
    dtype: torch.dtype
    options: Options

    @staticmethod
    def of(form: str, hidden: torch.Tensor, weight: torch.Tensor, options: Options) -> ChunkMemory:
        return ChunkMemory(form, hidden.shape[-1], weight.shape[0], product_dtype(hidden), options)

    @property
    def leaves_exponentials(self) -> bool:
        return self.form == "triton" and self.dtype == torch.bfloat16 and self.options.is_plain_softmax

    def bytes_of(self, rows: int) -> int:
        """Return the bytes of a chunk's buffers in a train step."""
        if self.leaves_exponentials:
            return ExponentialsPass.bytes_of(rows, self.width, self.vocabulary)
        if self.form == "checkpoint":  # logits, log-probabilities and their gradient
            return 3 * rows * self.vocabulary * self.dtype.itemsize
        caps = self.options.softcap is not None and self.form == "recompute"
        return TiledPass.bytes_of(rows, self.vocabulary, self.dtype, caps=caps)

    def rows_within(self, max_bytes: int | str) -> int:
        """Return the most rows whose buffers fit ``max_bytes``."""
        limit = parse_bytes(max_bytes)
        if self.bytes_of(1) > limit:
            raise ValueError(
                f"max_bytes of {format_bytes(limit)} is too small: one row of {self.vocabulary:,} logits takes "
                f"{format_bytes(self.bytes_of(1))} in form {self.form!r}"
            )
        rows = max(1, limit // (self.vocabulary * self.dtype.itemsize))
        # tiles are rounded up to whole rows: from the quotient this loop takes a few steps
        while self.bytes_of(rows) > limit:
            rows = max(1, min(rows - 1, rows * limit // self.bytes_of(rows)))
        return rows
