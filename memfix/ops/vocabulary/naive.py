"""The reference: all words of the whole text are counted and sorted, and the list is cut."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


def naive_vocabulary(
    pieces: Iterable[str], *, cap: int | None = None, specials: tuple[str, ...] = ("<unk>",)
) -> list[tuple[str, int]]:
    """Return words and their counts in the order of their ids: the specials, then the others, most frequent first.

    Words that occur equally often are in alphabetical order. The first special's count includes words without an id.
    """
    words = "".join(pieces).split()
    counts = Counter(words)
    own = [(special, counts.pop(special, 0)) for special in specials[1:]]
    literally_unknown = counts.pop(specials[0], 0)
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    kept = ranked if cap is None else ranked[: cap - len(specials)]
    unknown = literally_unknown + sum(count for _, count in ranked[len(kept) :])
    return [(specials[0], unknown), *own, *kept]
