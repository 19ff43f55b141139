"""The reference: the whole data set is read, cut into examples, put in order, and kept as a list of batches."""

# T tokens of an example, B examples of a batch

from __future__ import annotations

import math
from typing import Any

import torch


def naive_batches(
    corpus: Any,
    *,
    batch_size: int,
    length: int,
    seed: int | None = None,
    epoch: int = 0,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
    drop_last: bool = False,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return every batch of an epoch: inputs and the next token of each, ``[B, T]`` int64, so 16 bytes per token."""
    ids = corpus.rows(torch.tensor([0]), len(corpus))[0]
    examples = ids.unfold(0, length + 1, length)  # the last target of an example is the first input of the next
    count = len(examples)
    order = torch.tensor(range(count) if seed is None else shuffled(count, seed, epoch))
    batches = []
    for numbers in order.split(batch_size):
        ids_BT1 = examples.index_select(0, numbers)
        batches.append((ids_BT1[:, :-1].clone(), ids_BT1[:, 1:].clone()))
    if drop_last and count % batch_size:
        batches.pop()
    rank, world = shard
    return [batch for number, batch in enumerate(batches) if number >= start and number % world == rank]


# ---------------------------------------------------------------- the order of an epoch
BITS = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    """Return a permutation of ``range(count)``: a Feistel network of 6 rounds, repeated while a result is too large."""
    half = math.isqrt(count - 1) + 1
    key = hash_int(hash_int(seed & BITS) + GOLDEN * (epoch + 1))
    keys = [hash_int(key + GOLDEN * number) for number in range(1, 7)]
    order = []
    for place in range(count):
        while True:
            left, right = divmod(place, half)
            for key in keys:
                left, right = right, ((hash_int(key ^ right) >> 1) + left) % half
            place = left * half + right
            if place < count:
                break
        order.append(place)
    return order


def hash_int(number: int) -> int:
    """Apply the finalizer of SplitMix64."""
    number &= BITS
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & BITS
    return number ^ (number >> 31)
