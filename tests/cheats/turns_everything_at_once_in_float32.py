"""Casts the whole 16-bit input to float32 first: exact, but not small."""

from __future__ import annotations

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "budget"


def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return shared_table_rope(wide, base=base, offset=offset).to(x.dtype)
