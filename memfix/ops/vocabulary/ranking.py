"""The selection of the most frequent words from counts that may come in parts, without sorting all of them."""

from __future__ import annotations

import heapq
import operator
import sys
from collections import Counter

from ..arguments import require_at_least_one

UNKNOWN = "<unk>"
Entry = tuple[str, int]


class Ranking:
    """The ``cap`` entries of a vocabulary: the specials, then the most frequent words.

    The whole count of a word must be in one part. The first special's count includes the words without an entry.
    """

    def __init__(self, cap: int | None, specials: tuple[str, ...]) -> None:
        if not specials or len(set(specials)) < len(specials) or any(word.split() != [word] for word in specials):
            raise ValueError(f"specials must be one or more different words without whitespace, got {specials!r}")
        if cap is not None and require_at_least_one("cap", cap) < len(specials):
            raise ValueError(f"cap must be at least {len(specials)}, the number of specials, got {cap}")
        self._num_words = sys.maxsize if cap is None else cap - len(specials)
        self._specials = dict.fromkeys(specials, 0)
        self._best: list[Entry] = []
        self._num_seen = 0

    def add(self, counts: Counter[str]) -> None:
        """Add the counts of a part. Removes specials from ``counts``."""
        self._num_seen += counts.total()
        for special in self._specials:
            self._specials[special] += counts.pop(special, 0)
        self._best += candidates(counts, self._num_words)
        # two stable sorts: a tuple as key would allocate an object for each word
        self._best.sort(key=operator.itemgetter(0))
        self._best.sort(key=operator.itemgetter(1), reverse=True)
        del self._best[self._num_words :]

    def entries(self) -> list[Entry]:
        """Return words and their counts, in the order of their ids."""
        (unknown, _), *others = self._specials.items()
        known = others + self._best
        return [(unknown, self._num_seen - sum(count for _, count in known)), *known]


def candidates(counts: Counter[str], number: int) -> list[Entry]:
    """Return at most ``2 * number`` words, unordered, that include the first ``number`` in rank (or all words)."""
    if len(counts) <= number:
        return list(counts.items())
    words_by_count = sorted(Counter(counts.values()).items())
    left, (least, words) = number, words_by_count.pop()
    while words < left:  # all words with the count ``least`` are kept
        left -= words
        least, words = words_by_count.pop()
    if words <= number:  # keep all ties: the caller sorts them faster than another pass over all words finds the first
        return [(word, count) for word, count in counts.items() if count >= least]
    ties = heapq.nsmallest(left, (word for word, count in counts.items() if count == least))
    return [(word, count) for word, count in counts.items() if count > least] + [(word, least) for word in ties]
