"""Returns right answers, but seeds the global generator from which the caller's dropout draws."""

from __future__ import annotations

import functools

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


@functools.wraps(shared_table_rope)
def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    torch.manual_seed(offset)
    return shared_table_rope(x, base=base, offset=offset, positions_per_chunk=positions_per_chunk)
