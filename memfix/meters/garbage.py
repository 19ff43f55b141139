"""Garbage collections that visit only what a step made, not all of torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_FROZEN_BY_PYTHON = 1000
"""At most: Python 3.12 starts with 375 objects frozen. More are frozen by programs, tens of thousands at a time."""


@contextlib.contextmanager
def only_our_own_cycles(*, automatic: bool = False) -> Iterator[None]:
    """A collection visits only the objects that are made from here on, not all of torch; and, unless ``automatic``,
    Python starts none itself.

    Where the program has frozen objects of its own, nothing more is frozen: Python can only unfreeze all of them.
    """
    was_enabled, is_ours = gc.isenabled(), gc.get_freeze_count() <= _FROZEN_BY_PYTHON
    if not automatic:
        gc.disable()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()
        if was_enabled:
            gc.enable()
