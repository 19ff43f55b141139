"""A data set of batches for ``torch.utils.data.DataLoader``, whose workers divide them and keep their order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .streaming import BatchPlan
from .windows import Batch, Corpus, Windows


class BatchStream(IterableDataset[Batch]):
    """The batches of :func:`memfix.ops.batches.batches` as a data set.

    ``DataLoader(BatchStream(corpus, batch_size=32, length=128, seed=0), batch_size=None, num_workers=2)`` yields the
    same batches in the same order, whatever ``num_workers`` is. The keywords are those of ``batches``.
    """

    def __init__(self, corpus: Corpus, *, length: int, seed: int | None = None, **plan: Any) -> None:
        self.windows, self.plan = Windows(corpus, length, seed=seed), BatchPlan(**plan)

    def __len__(self) -> int:
        return len(self.plan.numbers(self.windows))

    def __iter__(self) -> Iterator[Batch]:
        worker, numbers = get_worker_info(), self.plan.numbers(self.windows)
        # the loader takes one batch from each worker in turn
        own = numbers if worker is None else numbers[worker.id :: worker.num_workers]
        return (self.windows.batch(self.plan.examples(number, self.windows)) for number in own)
