"""Gathers the table's row of every position and saves it for backward, instead of reading the table in the kernel."""

from __future__ import annotations

import functools

from memfix.ops.rope.rope_positions_contract import shared_table_rope_positions, triton_rope_positions

OP, LIKE, CAUGHT_BY = "rope_positions", "triton", "budget"


@functools.wraps(triton_rope_positions)
def form(x, positions, **options):
    return shared_table_rope_positions(x, positions, positions_per_chunk=1, **options)
