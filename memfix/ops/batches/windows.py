"""The examples of a corpus, indexed by number: any process can make any of them, in any order."""

# B examples, T tokens of an example

from __future__ import annotations

import functools
from typing import Protocol

import torch

from ...errors import CorpusError
from ..arguments import require_at_least_one, require_int
from .shuffle import shuffled

Batch = tuple[torch.Tensor, torch.Tensor]
# the order of a block is computed at once, by a hundred calls of small torch operators
_EXAMPLES_PER_BLOCK = 1024


class Corpus(Protocol):
    """Tokens that can be read from any position, such as a :class:`TokenFile` or a :class:`ZipfCorpus`."""

    def __len__(self) -> int:
        """Return the number of tokens."""

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        """Return the ``width`` tokens from each start on, int64 ``[B, width]``."""


class Windows:
    """A corpus cut into examples of ``length`` inputs; the target of each input is the token after it.

    Numbers of examples run through all epochs: ``epoch * len(windows) + place``. With a ``seed`` each epoch has its own
    order; without one, examples are in the order of the corpus. The last target of an example is the first input of the
    next one in the corpus. Tokens after the last whole example are left out.
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
        """Return the number of examples of an epoch."""
        return self._count

    def rows(self, numbers: range) -> torch.Tensor:
        """Return the tokens of these examples, inputs and the last target: int64 ``[B, T + 1]``."""
        return self.corpus.rows(self.starts(numbers), self.length + 1)

    def batch(self, numbers: range) -> Batch:
        """Return the inputs and targets of these examples, int64 ``[B, T]``. The two share their memory."""
        ids_BT1 = self.rows(numbers)
        return ids_BT1[:, :-1], ids_BT1[:, 1:]

    def window(self, number: int) -> Batch:
        """Return the inputs and targets of one example, int64 ``[T]``."""
        inputs_BT, targets_BT = self.batch(range(number, number + 1))
        return inputs_BT[0], targets_BT[0]

    def starts(self, numbers: range) -> torch.Tensor:
        """Return the position of each example's first token in the corpus. ``numbers`` must be >= 0 and ascend."""
        require_int("the number of an example", numbers.start, at_least=0)
        require_at_least_one("the step of examples", numbers.step)
        found = [torch.empty(0, dtype=torch.int64)]
        while numbers:
            epoch, place = divmod(numbers[0], self._count)
            block, offset = divmod(place, _EXAMPLES_PER_BLOCK)
            starts = self._block(epoch, block)[offset :: numbers.step][: len(numbers)]
            found.append(starts)
            numbers = numbers[len(starts) :]
        return found[1] if len(found) == 2 else torch.cat(found)

    def _starts_of_block(self, epoch: int, block: int) -> torch.Tensor:
        places = torch.arange(block * _EXAMPLES_PER_BLOCK, min((block + 1) * _EXAMPLES_PER_BLOCK, self._count))
        if self.seed is not None:
            places = shuffled(places, self._count, seed=self.seed, epoch=epoch)
        return places * self.length

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial(Windows, seed=self.seed), (self.corpus, self.length)
