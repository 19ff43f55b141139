"""A permutation that is computed for any places, so that no array as long as the corpus is held.

It is a Feistel network over pairs ``(left, right)`` of numbers below ``half``, the smallest number whose square is at
least ``count``. A result of ``count`` or more is permuted again until it is smaller (cycle walking).
"""

from __future__ import annotations

import math

import torch

from .hashing import GOLDEN, hash_, hash_int, int64, shifted

ROUNDS = 6


def shuffled(places: torch.Tensor, count: int, *, seed: int, epoch: int = 0) -> torch.Tensor:
    """Return the elements at ``places`` (int64) of a permutation of ``range(count)``, which differs by epoch."""
    half = math.isqrt(count - 1) + 1
    first_key = hash_int(hash_int(seed) + GOLDEN * (epoch + 1))
    keys = [hash_int(first_key + GOLDEN * (number + 1)) for number in range(ROUNDS)]
    found = _permuted(places, half, keys)
    while (outside := found >= count).any():
        found = torch.where(outside, _permuted(found, half, keys), found)
    return found


def _permuted(numbers: torch.Tensor, half: int, keys: list[int]) -> torch.Tensor:
    left, right = numbers // half, numbers % half
    for key in keys:
        left, right = right, (shifted(hash_(right ^ int64(key)), 1) % half).add_(left).remainder_(half)
    return left * half + right
