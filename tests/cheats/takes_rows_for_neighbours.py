"""Checks only that a row is contiguous, and reads the rows as if each followed the one before."""

from __future__ import annotations

import functools

import torch

from memfix.ops.rope.shared_table import shared_table_rope

OP, LIKE, CAUGHT_BY = "rope", "shared_table", "equality"


@functools.wraps(shared_table_rope)
def form(x, **options):
    if x.stride(-1) == 1:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
    return shared_table_rope(x, **options)
