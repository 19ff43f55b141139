"""Frees what a step leaves behind: reference cycles, by collections that skip older objects, and last gradients."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FROZEN_BY_PYTHON = 1000
"""The most objects that Python freezes itself (3.12: 375 at start). A program that freezes has tens of thousands."""


@contextlib.contextmanager
def only_our_own_cycles(*, automatic: bool = False) -> Iterator[None]:
    """Inside, the garbage collector visits only objects made inside, not all of torch's. Automatic collections are off
    unless ``automatic``.

    Older objects are frozen (``gc.freeze``), but not if the program froze some itself: Python can only unfreeze all.
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


def free_last_gradients(device: torch.device | str) -> None:
    """Run a backward of an empty tensor, after which autograd's thread for ``device`` has freed the last gradients. It
    would otherwise keep them until it waits for work again, on a busy machine until the middle of the next step."""
    import torch

    none = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.grad(none.exp(), none, none)
