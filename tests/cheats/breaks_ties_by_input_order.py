"""Of equally frequent words it keeps those that come first, so that the result depends on the order of the text."""

from __future__ import annotations

import functools
from collections import Counter

from memfix.ops.vocabulary.ranking import UNKNOWN, Ranking
from memfix.ops.vocabulary.streaming import streaming_vocabulary
from memfix.ops.vocabulary.text import words_in

OP, LIKE, CAUGHT_BY = "vocabulary", "streaming", "equality"


@functools.wraps(streaming_vocabulary)
def form(text, *, cap=None, specials=(UNKNOWN,)):
    Ranking(cap, specials)  # refuses bad arguments
    counts = Counter(word for words in words_in(text) for word in words)
    total = counts.total()
    own = [(special, counts.pop(special, 0)) for special in specials]
    known = own[1:] + counts.most_common(None if cap is None else cap - len(specials))
    return [(specials[0], total - sum(count for _, count in known)), *known]
