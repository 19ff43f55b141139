"""What a step leaves: collections that visit only its own objects, and gradients that torch still keeps."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_FROZEN_BY_PYTHON = 1000
"""Python 3.12 itself freezes 375 objects at start. A program that freezes its own freezes tens of thousands."""


@contextlib.contextmanager
def only_our_own_cycles(*, automatic: bool = False) -> Iterator[None]:
    """Inside, a collection visits only objects made inside, not all of torch. Automatic collections are off unless
    ``automatic``.

    If the program has frozen objects itself, nothing is frozen here, because Python can only unfreeze all at once.
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
    """torch's thread for a GPU keeps the last gradients until it waits for work again, which on a busy machine is late:
    they would be freed in the middle of what follows. After another backward, here of no bytes, they are gone."""
    import torch

    none = torch.empty(0, device=device, requires_grad=True)
    torch.autograd.grad(none.exp(), none, none)
