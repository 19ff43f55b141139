"""Words are counted while the text is read; of the text, only the last piece is in memory."""

from __future__ import annotations

from collections import Counter

from .ranking import UNKNOWN, Entry, Ranking
from .text import Text, words_in


def streaming_vocabulary(text: Text, *, cap: int | None = None, specials: tuple[str, ...] = (UNKNOWN,)) -> list[Entry]:
    """Equals ``naive_vocabulary(text, cap=cap, specials=specials)``, which holds the whole text and all its words.

    Peak: a dictionary of the different words, about 140 bytes each, and the words of one piece. It does not grow with
    the length of the text.
    """
    ranking = Ranking(cap, specials)
    counts: Counter[str] = Counter()
    for words in words_in(text):
        counts.update(words)
    ranking.add(counts)
    return ranking.entries()
