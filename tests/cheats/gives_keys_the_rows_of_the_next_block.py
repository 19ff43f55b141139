"""Reads the sorted selection one block too far: keys get gradients from the query rows of the next block."""

from __future__ import annotations

import functools

import pytest
import torch

from memfix.ops.nsa import triton

OP, LIKE, CAUGHT_BY = "nsa", "triton", "equality"


class _NextBlock(triton._Nsa):
    @staticmethod
    def backward(ctx, upstream):
        honest = triton._by_block

        def shifted(selected_NTn: torch.Tensor, num_selectable: int) -> tuple[torch.Tensor, torch.Tensor]:
            order_NTn, bounds_NS = honest(selected_NTn, num_selectable + 1)
            return order_NTn, bounds_NS[:, 1:].contiguous()

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton, "_by_block", shifted)
            return triton._Nsa.backward(ctx, upstream)


@functools.wraps(triton.triton_nsa)
def form(q, k, v, gates, position_embedding=None, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "_Nsa", _NextBlock)
        return triton.triton_nsa(q, k, v, gates, position_embedding, **options)
