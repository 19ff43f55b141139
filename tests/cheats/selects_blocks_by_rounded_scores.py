"""Rounds the scores of blocks to the working dtype: ties then select other blocks than naive does."""

from __future__ import annotations

import functools

import torch

from memfix.ops.nsa import chunked

OP, LIKE, CAUGHT_BY = "nsa", "chunked", "equality"


@functools.wraps(chunked.chunked_nsa)
def form(q, k, v, gates, position_embedding=None, **options):
    honest = chunked.probabilities_in_float64

    def rounded(*arguments) -> torch.Tensor:
        return honest(*arguments).to(q.dtype).double()

    chunked.probabilities_in_float64 = rounded
    try:
        return chunked.chunked_nsa(q, k, v, gates, position_embedding, **options)
    finally:
        chunked.probabilities_in_float64 = honest


def shows_in(case):
    return "float16" in case.dtype
