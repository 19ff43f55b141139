"""The examples of a corpus by number: any of them can be made by any process, in any order."""

# B examples, T tokens of an example

from __future__ import annotations

import functools
from typing import Protocol

import torch

from ...errors import CorpusError
from ..arguments import require_at_least_one, require_int
from .shuffle import shuffled

Batch = tuple[torch.Tensor, torch.Tensor]
_BLOCK = 1024  # examples whose order is computed at once: a hundred small operators of torch are called for a block


class Corpus(Protocol):
    """Tokens that can be read from any position, such as a :class:`TokenFile` or a :class:`ZipfCorpus`."""

    def __len__(self) -> int:
        """The number of tokens."""

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        """The ``width`` tokens from each start on, int64 ``[B, width]``."""


class Windows:
    """A corpus cut into examples of ``length`` inputs, each with the token after it as its target.

    Examples are numbered through all epochs: number ``epoch * len(windows) + place``. With a ``seed`` each epoch has
    an order of its own; without one, examples come as they are in the corpus. The last target of an example is the
    first input of the next. Tokens after the last whole example are left out.
    """

    def __init__(self, corpus: Corpus, length: int, *, seed: int | None = None) -> None:
        self.corpus, self.length, self.seed = corpus, require_at_least_one("length", length), seed
        self._count = (len(corpus) - 1) // length
        if self._count < 1:
            raise CorpusError(
                f"the corpus has {len(corpus):,} tokens, and one example takes {length + 1:,}: shorten the examples"
            )
        self._block = functools.lru_cache(maxsize=1)(self._starts_of_block)

    def __len__(self) -> int:
        """The number of examples of an epoch."""
        return self._count

    def rows(self, numbers: range) -> torch.Tensor:
        """The tokens of these examples, inputs and the last target: int64 ``[B, T + 1]``."""
        return self.corpus.rows(self.starts(numbers), self.length + 1)

    def batch(self, numbers: range) -> Batch:
        """The inputs and targets of these examples, int64 ``[B, T]``. The two share their memory."""
        ids_BT1 = self.rows(numbers)
        return ids_BT1[:, :-1], ids_BT1[:, 1:]

    def window(self, number: int) -> Batch:
        """The inputs and targets of one example, int64 ``[T]``."""
        inputs_BT, targets_BT = self.batch(range(number, number + 1))
        return inputs_BT[0], targets_BT[0]

    def starts(self, numbers: range) -> torch.Tensor:
        """The position in the corpus of the first token of each example. ``numbers`` must be 0 or more, and ascend."""
        require_int("the number of an example", numbers.start, at_least=0)
        require_at_least_one("the step of examples", numbers.step)
        found = [torch.empty(0, dtype=torch.int64)]
        while numbers:
            epoch, place = divmod(numbers[0], self._count)
            block, offset = divmod(place, _BLOCK)
            starts = self._block(epoch, block)[offset :: numbers.step][: len(numbers)]
            found.append(starts)
            numbers = numbers[len(starts) :]
        return found[1] if len(found) == 2 else torch.cat(found)

    def _starts_of_block(self, epoch: int, block: int) -> torch.Tensor:
        places = torch.arange(block * _BLOCK, min((block + 1) * _BLOCK, self._count))
        if self.seed is not None:
            places = shuffled(places, self._count, seed=self.seed, epoch=epoch)
        return places * self.length

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(Windows, seed=self.seed), (self.corpus, self.length)
