"""Child processes of the checks: forked from one that has torch where that is safe, and started anew elsewhere."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Literal

from ..orphans import ends_with_parent

StartMethod = Literal["fork", "spawn"]


def start_method() -> StartMethod:
    """How children may start now. A fork needs neither torch's import nor ours again: four seconds each.

    Another thread could hold a lock that the child then waits for, torch refuses a backward in a child of a process
    whose autograd has threads, and a GPU that was asked for cannot be used after a fork.
    """
    from ..meters.cuda import gpu_unavailable_reason

    has_threads = sys.platform != "linux" or threading.active_count() > 1 or _has_autograd_threads()
    return "spawn" if has_threads or gpu_unavailable_reason() is None else "fork"


def _has_autograd_threads() -> bool:
    """Whether autograd has started its threads, which torch names ``pt_autograd``."""
    names = (task / "comm" for task in Path("/proc/self/task").iterdir())
    return any(name.read_text().startswith("pt_autograd") for name in names)


@ends_with_parent
def start_worker(num_processes: int = 1) -> None:
    """Begin a worker of a process pool. ``num_processes`` is how many of them measure on one GPU."""
    from ..meters.cuda import CudaMeter

    take_one_core()
    CudaMeter.num_processes = num_processes


def take_one_core() -> None:
    """For a child's start. Small tensors gain nothing from torch's own threads, and other processes use the cores."""
    import torch

    torch.set_num_threads(1)
