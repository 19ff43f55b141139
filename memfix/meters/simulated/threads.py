"""Simulates the operators of threads that the step starts. Dispatch modes belong to the thread that enters them."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pools
from typing import Any

import torch

from .patches import Patch
from .tracking import StorageTracker


def patches(tracker: StorageTracker) -> list[Patch]:
    """Run the functions of threads, and what is submitted to pools of threads, inside the modes."""
    watched = _Watched(tracker)

    def inside(real: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(real)
        def run(work: Any, *args: Any) -> Any:
            if getattr(work, "_target", None) is getattr(pools, "_worker", work):  # it waits for what is submitted
                return real(work, *args)
            with watched.simulated():
                return real(work, *args)

        return run

    return [
        (threading.Thread, "run", inside(threading.Thread.run)),
        (pools._WorkItem, "run", inside(pools._WorkItem.run)),
    ]


class _Watched:
    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self._main = threading.get_ident()

    @contextlib.contextmanager
    def simulated(self) -> Iterator[None]:
        if threading.get_ident() == self._main or torch._C._len_torch_dispatch_stack():
            yield
            return
        tracker = self._tracker
        tracker.is_threaded = True
        with torch.autograd.set_multithreading_enabled(False), tracker.cache.mode, tracker:
            yield
