"""Batches are made on demand; of the corpus, only the batches of the last read are kept in memory."""

# B examples of a batch, T tokens of an example

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..arguments import require_at_least_one, require_int
from .windows import Batch, Corpus, Windows

_TOKENS_PER_READ = 32_768  # smaller reads cost as much


def streaming_batches(
    corpus: Corpus,
    *,
    batch_size: int,
    length: int,
    seed: int | None = None,
    epoch: int = 0,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
    drop_last: bool = False,
) -> Iterator[Batch]:
    """Equals ``iter(naive_batches(...))``, which reads the whole corpus first.

    A read has 32,768 tokens or one batch; small batches of one read share its memory. Peak above the corpus: 8 bytes
    for each token of two reads (the one that the caller holds and the next one), the ids in the dtype of the file, and
    the order of 1024 examples. None of it depends on the length of the corpus.
    """
    plan = BatchPlan(batch_size=batch_size, epoch=epoch, start=start, shard=shard, drop_last=drop_last)
    return _stream(plan, Windows(corpus, length, seed=seed))


def _stream(plan: BatchPlan, windows: Windows) -> Iterator[Batch]:
    numbers, width = plan.numbers(windows), windows.length + 1
    at_once = max(1, _TOKENS_PER_READ // (plan.batch_size * width))
    for first in range(0, len(numbers), at_once):
        examples = [plan.examples(number, windows) for number in numbers[first : first + at_once]]
        rows = windows.corpus.rows(torch.cat([windows.starts(some) for some in examples]), width)
        for ids_BT1 in rows.split([len(some) for some in examples]):
            yield ids_BT1[:, :-1], ids_BT1[:, 1:]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The selection of an epoch's batches. ``start`` is the number of batches to skip, counted over all shards, and
    ``shard=(rank, world)`` takes every ``world``-th batch."""

    batch_size: int
    epoch: int = 0
    start: int = 0
    shard: tuple[int, int] = (0, 1)
    drop_last: bool = False

    def __post_init__(self) -> None:
        require_at_least_one("batch_size", self.batch_size)
        require_int("epoch", self.epoch, at_least=0)
        require_int("start", self.start, at_least=0)
        rank, world = self.shard
        require_at_least_one("the number of shards", world)
        if require_int("the rank of a shard", rank, at_least=0) >= world:
            raise ValueError(f"shard must be (rank, world) with rank below world, got {self.shard}")

    def numbers(self, windows: Windows) -> range:
        """Return the numbers of the batches, in order."""
        count, (rank, world) = len(windows), self.shard
        num_batches = count // self.batch_size if self.drop_last else -(-count // self.batch_size)
        return range(self.start + (rank - self.start) % world, num_batches, world)

    def examples(self, number: int, windows: Windows) -> range:
        """Return the numbers of the examples in a batch. The last batch may have fewer."""
        count, first = len(windows), number * self.batch_size
        return range(self.epoch * count + first, self.epoch * count + min(first + self.batch_size, count))
