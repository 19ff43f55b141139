"""The vocabulary of a text that does not fit in memory."""

from __future__ import annotations

from typing import Any

from ..dispatch import Dispatcher
from .ranking import UNKNOWN
from .table import Vocabulary
from .text import Text

__all__ = ["FORMS", "UNKNOWN", "Text", "Vocabulary", "vocabulary"]
DISPATCHER = Dispatcher("vocabulary", __name__, forms=("streaming", "bounded"), otherwise="streaming")
FORMS = DISPATCHER.names


def vocabulary(
    text: Text, *, cap: int | None = None, specials: tuple[str, ...] = (UNKNOWN,), form: str = "auto", **options: Any
) -> Vocabulary:
    """Return the ``cap`` most frequent words of ``text`` (default: all), with ``specials`` first and inside the cap.

    ``text`` is a string, the path of a UTF-8 file, or an iterable of both. It is read once, a piece at a time. Words
    are cut as by ``str.split``; of words that occur equally often, the first in alphabetical order is kept. The first
    special stands for words that have no id.

    ``form="streaming"`` holds a count for each different word. ``form="bounded"`` holds at most ``max_types`` counts (a
    further keyword), and keeps the others in temporary files in ``folder``. Both are exact.
    """
    return Vocabulary(tuple(DISPATCHER.function(form)(text, cap=cap, specials=specials, **options)))
