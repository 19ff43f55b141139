"""How many rows a chunk has: as many as a given number of bytes holds, or, where nobody says, what suits the step."""

from __future__ import annotations

import torch

from ...units import GiB, format_bytes, parse_bytes
from .products import sum_dtype
from .recompute import TiledPass
from .terms import Terms
from .triton import ExponentialsPass

USUAL_BYTES = int(2.7 * GiB)
"""What a train step may take above its inputs where nobody says: twice the gradients of the incident's loss."""
FEWEST_ROWS = 2048
"""Below it, matrix products spend more time on the edges of a chunk than memory is worth."""
_MULTIPLE = 128  # the rows of a tile of a matrix product


def chunk_bytes(form: str, rows: int, width: int, vocabulary: int, dtype: torch.dtype, terms: Terms) -> int:
    """What the buffers of a chunk take in a train step."""
    if _leaves_exponentials(form, dtype, terms):
        return ExponentialsPass.bytes_of(rows, width, vocabulary)
    if form == "checkpoint":  # logits, log-probabilities and their gradient
        return 3 * rows * vocabulary * dtype.itemsize
    return TiledPass.bytes_of(rows, vocabulary, dtype, caps=terms.softcap is not None and form == "recompute")


def _leaves_exponentials(form: str, dtype: torch.dtype, terms: Terms) -> bool:
    return form == "triton" and dtype == torch.bfloat16 and terms.is_plain_softmax


def rows_within(max_bytes: int | str, form: str, width: int, vocabulary: int, dtype: torch.dtype, terms: Terms) -> int:
    """The most rows whose buffers fit ``max_bytes``."""
    limit = parse_bytes(max_bytes)

    def taken(rows: int) -> int:
        return chunk_bytes(form, rows, width, vocabulary, dtype, terms)

    if taken(1) > limit:
        raise ValueError(
            f"max_bytes of {format_bytes(limit)} is too small: one row of {vocabulary:,} logits takes "
            f"{format_bytes(taken(1))} in form {form!r}"
        )
    rows = max(1, limit // (vocabulary * dtype.itemsize))
    while taken(rows) > limit:  # tiles are rounded up to whole rows, so this ends within a few steps of the quotient
        rows = max(1, min(rows - 1, rows * limit // taken(rows)))
    return rows


def usual_rows(form: str, num_tokens: int, width: int, vocabulary: int, dtype: torch.dtype, terms: Terms) -> int:
    """As few chunks of one size as keep a train step within ``USUAL_BYTES``, but none of less than ``FEWEST_ROWS``."""
    for num_chunks in range(1, max(1, num_tokens // FEWEST_ROWS) + 1):
        rows = -(-num_tokens // num_chunks)
        rows = -(-rows // _MULTIPLE) * _MULTIPLE
        in_place = num_chunks == 1 or _leaves_exponentials(form, dtype, terms)
        weight_item = dtype.itemsize if in_place else sum_dtype(dtype).itemsize
        gradients = (num_tokens * dtype.itemsize + vocabulary * weight_item) * width
        if gradients + chunk_bytes(form, rows, width, vocabulary, dtype, terms) <= USUAL_BYTES:
            return rows
    return FEWEST_ROWS
