"""Collections of garbage that look only at what a step made, not at all of torch."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

_FROZEN_BY_PYTHON = 1000
"""At most: Python 3.12 starts with 375 objects frozen. More are frozen by programs, tens of thousands at a time."""


@contextlib.contextmanager
def only_our_own_cycles() -> Iterator[None]:
    """No automatic collection, and an asked-for one looks only at what is made from here on, not at all of torch.

    Where the program has frozen what it found worth it, that stays as it is: nobody could thaw our part alone.
    """
    was_enabled, is_ours = gc.isenabled(), gc.get_freeze_count() <= _FROZEN_BY_PYTHON
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
