"""Batches of a corpus that does not fit in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..dispatch import Dispatcher
from .loader import BatchStream
from .token_file import TokenFile, write_tokens
from .windows import Batch, Corpus, Windows
from .zipf import ZipfCorpus

__all__ = ["FORMS", "Batch", "BatchStream", "Corpus", "TokenFile", "Windows", "ZipfCorpus", "batches", "write_tokens"]
DISPATCHER = Dispatcher("batches", __name__, forms=("streaming",), otherwise="streaming")
FORMS = DISPATCHER.names


def batches(corpus: Corpus, *, batch_size: int, length: int, form: str = "auto", **which: Any) -> Iterator[Batch]:
    """Iterate over the batches of one epoch: ``(inputs, targets)``, int64 ``[batch_size, length]``; the last may have
    fewer rows.

    ``which`` takes ``seed``, which shuffles the examples anew in each ``epoch`` (without a seed they come in order);
    ``start``, the number of batches to skip; ``shard=(rank, world)``, which divides the batches among processes; and
    ``drop_last=True``, which leaves out a last batch that is not full. Host memory does not grow with the corpus. For
    single examples by number see :class:`Windows`, for a ``DataLoader`` :class:`BatchStream`.
    """
    made: Iterator[Batch] = DISPATCHER.function(form)(corpus, batch_size=batch_size, length=length, **which)
    return made
