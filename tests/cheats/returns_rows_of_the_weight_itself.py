"""Looks consecutive ids up without a copy: to write into the rows then changes the weight."""

from __future__ import annotations

import functools

from memfix.ops.embedding.gather import gather_embedding

OP, LIKE, CAUGHT_BY = "embedding", "gather", "equality"


@functools.wraps(gather_embedding)
def form(ids, weight_VD):
    first = int(ids[0]) if len(ids) else 0
    if ids.tolist() == [*range(first, first + len(ids))]:
        return weight_VD[first : first + len(ids)]
    return gather_embedding(ids, weight_VD)
