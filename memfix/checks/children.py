"""Child processes of the checks: forked from one that has torch where that is safe, and started anew elsewhere."""

from __future__ import annotations

import sys
import threading
from typing import Literal

StartMethod = Literal["fork", "spawn"]


def start_method() -> StartMethod:
    """How children may start now. A fork needs neither torch's import nor ours again: four seconds each.

    Another thread could hold a lock that the child then waits for, and a GPU that was asked for cannot be used after a
    fork.
    """
    from ..meters.cuda import gpu_unavailable_reason

    is_safe = sys.platform == "linux" and threading.active_count() == 1 and gpu_unavailable_reason() is not None
    return "fork" if is_safe else "spawn"


def import_what_equality_needs() -> None:
    """Before a fork: what a first comparison imports, but not Triton.

    Triton decides when it is imported whether kernels are interpreted, and one child differs from the others in that.
    """
    import torch.fx.experimental.symbolic_shapes  # noqa: F401

    from . import equality  # noqa: F401


def import_what_meters_need() -> None:
    """Before a fork: what a first simulated step imports, Triton too."""

    from ..meters.simulated import environment  # noqa: F401
    from . import memory  # noqa: F401


def take_one_core() -> None:
    """For a child's start. Small tensors gain nothing from torch's own threads, and other processes use the cores."""
    import torch

    torch.set_num_threads(1)
