"""Start the checks' child processes: forked from a process that has imported torch where that is safe, else spawned."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from ..orphans import ends_with_parent

StartMethod = Literal["fork", "spawn"]


def start_method() -> StartMethod:
    """Return how children may be started now. A fork saves each child the imports of torch and memfix: four seconds.

    A fork is unsafe if another thread could hold a lock that the child then waits for, if autograd has threads (torch
    then refuses a backward in the child), and if there is a GPU: CUDA, once initialised, cannot be used after a fork.
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
    """Initialise a worker of a process pool. ``num_processes`` processes share the GPU."""
    from ..meters.cuda import CudaMeter

    take_one_core()
    CudaMeter.num_processes = num_processes


def take_one_core() -> None:
    """Limit torch to one thread: small tensors gain nothing from more, and other processes use the other cores."""
    import torch

    torch.set_num_threads(1)


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Limit torch to one thread inside: on busy cores the threads of a small operator mostly wait for each other."""
    import torch

    before = torch.get_num_threads()
    take_one_core()
    try:
        yield
    finally:
        torch.set_num_threads(before)
