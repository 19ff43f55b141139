"""Selects blocks by compressed keys in one piece, and never in float64: of nearly equal scores it takes others."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from memfix.ops.nsa import triton

OP, LIKE, CAUGHT_BY = "nsa", "triton", "equality"


@functools.wraps(triton.triton_nsa)
def form(q, k, v, gates, position_embedding=None, **options):
    honest = triton._Selection._score

    def quick(self, *arguments, exact: bool) -> None:
        if exact:
            self.num_doubtful_N.zero_()
        else:
            rounded = dataclasses.replace(self.compressed, low_NMD=None)
            honest(dataclasses.replace(self, compressed=rounded), *arguments, exact=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton._Selection, "_score", quick)
        return triton.triton_nsa(q, k, v, gates, position_embedding, **options)
