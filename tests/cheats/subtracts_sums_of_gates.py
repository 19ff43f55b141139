"""Makes decays from differences of cumulative sums: nothing overflows, but strong gates cancel all digits."""

from __future__ import annotations

import functools

from memfix.ops.kda import wy

OP, LIKE, CAUGHT_BY = "kda", "wy", "equality"


def from_differences(gates, qk):
    for _ in gates.levels():
        pass
    sums = gates.up_to_row_ZCK
    decay = (sums.unsqueeze(2) - sums.unsqueeze(1)).clamp(max=0).exp()
    q, k = qk.unbind(2)
    p, a = ((rows.unsqueeze(2) * k.unsqueeze(1) * decay).sum(-1) for rows in (q, k))
    return p.tril(), a.tril(-1)


@functools.wraps(wy.wy_kda)
def form(q, k, v, g, beta, initial_state=None, *, scale=None, chunk_size=64):
    honest, wy.decayed_products = wy.decayed_products, from_differences
    try:
        return wy.wy_kda(q, k, v, g, beta, initial_state, scale=scale, chunk_size=chunk_size)
    finally:
        wy.decayed_products = honest
