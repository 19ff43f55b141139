"""Keeps the whole input until backward, which needs only the angles of the rotation."""

from __future__ import annotations

import functools

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "budget"


@functools.wraps(shared_table_rope)
def form(x, **options):
    turned = shared_table_rope(x, **options)
    if turned.grad_fn is not None:
        turned.grad_fn.metadata["input"] = x
    return turned
