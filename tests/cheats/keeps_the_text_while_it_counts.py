"""Reads the text as a stream but keeps every piece, so that its memory grows with the text."""

from __future__ import annotations

import functools

from memfix.ops.vocabulary.ranking import UNKNOWN
from memfix.ops.vocabulary.streaming import streaming_vocabulary

OP, LIKE, CAUGHT_BY = "vocabulary", "streaming", "scaling"


@functools.wraps(streaming_vocabulary)
def form(text, *, cap=None, specials=(UNKNOWN,)):
    return streaming_vocabulary(list(text), cap=cap, specials=specials)
