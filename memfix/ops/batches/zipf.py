"""A seeded corpus with the word frequencies of language, without a file: each token is a function of its position."""

from __future__ import annotations

import torch

from ...errors import CorpusError
from ..arguments import require_int, require_number
from .hashing import GOLDEN, hash_, hash_int, int64, shifted

_BITS = 53  # bits of a random number: float64 represents integers of this size exactly


class ZipfCorpus:
    """Tokens drawn independently by Zipf's law: the probability of token ``i`` is in proportion to
    ``(i + 1) ** -exponent``.

    It holds a table of 8 bytes per word of the vocabulary, however many tokens it has.
    """

    def __init__(self, num_tokens: int, vocabulary_size: int, *, seed: int = 0, exponent: float = 1.0) -> None:
        self.num_tokens = require_int("num_tokens", num_tokens, at_least=0)
        self.vocabulary_size = require_int("vocabulary_size", vocabulary_size, at_least=1)
        require_number("exponent", exponent, "at least 0", lambda number: number >= 0)
        if num_tokens == 0:
            raise CorpusError("the corpus is empty: num_tokens is 0")
        self._key = hash_int(seed)
        share = torch.arange(1, vocabulary_size + 1, dtype=torch.float64).pow_(-exponent).cumsum(0)
        self._limits = share.div_(share[-1].clone()).mul_(2**_BITS).round_().to(torch.int64)

    def __len__(self) -> int:
        return self.num_tokens

    def rows(self, starts_B: torch.Tensor, width: int) -> torch.Tensor:
        """Return the ``width`` tokens from each start on, int64 ``[B, width]``."""
        numbers = starts_B[:, None] + torch.arange(width)
        numbers = hash_(numbers.mul_(int64(GOLDEN)).add_(self._key))
        return torch.searchsorted(self._limits, shifted(numbers, 64 - _BITS), right=True)
