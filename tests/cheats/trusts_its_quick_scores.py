"""Selects every query's blocks by quick scores: of scores that tie, and of those that nearly do, it takes others."""

from __future__ import annotations

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
            honest(self, *arguments, exact=False)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton._Selection, "_score", quick)
        return triton.triton_nsa(q, k, v, gates, position_embedding, **options)
