"""Returns a correct gradient without a graph: a gradient penalty then silently gets no gradient."""

from __future__ import annotations

import functools

import torch

from memfix.ops.rope import default_tables
from memfix.ops.rope.shared_table import _Rotation, shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


class _WithoutGraph(_Rotation):
    @staticmethod
    def backward(ctx, grad):
        with torch.no_grad():
            return _Rotation.backward(ctx, grad)


@functools.wraps(shared_table_rope)
def form(x, *, base=10_000.0, offset=0, positions_per_chunk=None):
    rows = default_tables().rows(x, base=base, num_positions=offset + x.shape[-3])
    rows = rows[offset : offset + x.shape[-3]].unsqueeze(-2)
    return _WithoutGraph.apply(x, rows, 1, positions_per_chunk or x.shape[-3])
