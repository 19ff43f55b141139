"""Tells which phase of a train step is running: ``forward``, ``backward`` or ``optimizer``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class RunningPhase:
    def __init__(self) -> None:
        self._num_optimizers = 0

    @property
    def name(self) -> str:
        if self._num_optimizers:
            return "optimizer"
        return "backward" if is_in_backward() else "forward"

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Count running optimizer steps, with torch's hooks for all optimizers."""

        def entered(*args: Any) -> None:
            self._num_optimizers += 1

        def left(*args: Any) -> None:
            self._num_optimizers -= 1

        hooks = [register_optimizer_step_pre_hook(entered), register_optimizer_step_post_hook(left)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def is_in_backward() -> bool:
    """Whether the autograd engine is running on this thread."""
    return torch._C._current_graph_task_id() != -1
