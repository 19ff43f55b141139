"""Rotates the upstream gradient by the angle of the forward, instead of back."""

from __future__ import annotations

import functools

from memfix.ops.rope import default_tables
from memfix.ops.rope.triton import _Rotation, triton_rope

OP, LIKE, CAUGHT_BY = "rope", "triton", "equality"


class _OneWay(_Rotation):
    @staticmethod
    def backward(ctx, grad):
        table, positions_BT = ctx.saved_tensors
        return _Rotation.apply(grad, table, positions_BT, ctx.is_inverse), None, None, None


@functools.wraps(triton_rope)
def form(x, *, base=10_000.0, offset=0, **_):
    table = default_tables().rows(x, base=base, num_positions=offset + x.shape[-3])
    return _OneWay.apply(x, table[offset:], None, False)
