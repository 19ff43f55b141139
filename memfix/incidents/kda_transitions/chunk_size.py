"""The number of tokens per chunk of the KDA scan: one default and one check for block, model and config."""

from __future__ import annotations

import warnings

from ...ops.arguments import require_at_least_one
from ...ops.kda.arguments import DEFAULT_CHUNK_SIZE

__all__ = ["DEFAULT_CHUNK_SIZE", "RECOMMENDED", "validated_chunk_size"]

# the report's range (KDA-22); it recommends 16 as well, which lies outside (KDA-30)
RECOMMENDED = range(32, 129)


def validated_chunk_size(chunk_size: object) -> int:
    """Return ``chunk_size``, which must be an int of at least 1. Warn if it is outside the recommended range."""
    size = require_at_least_one("memory_chunk_size", chunk_size)
    if size not in RECOMMENDED:
        warnings.warn(
            f"memory_chunk_size {size} is outside the recommended {RECOMMENDED[0]} to {RECOMMENDED[-1]}: "
            "smaller chunks take more launches, larger ones more memory",
            stacklevel=3,
        )
    return size
