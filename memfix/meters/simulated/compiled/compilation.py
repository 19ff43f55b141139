"""What the compilers of one simulation share with the patches of Inductor, and how compiled code is run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ....errors import MeasurementError
from ..patches import Patches
from ..tracking import StorageTracker

COMPARED: frozenset[tuple[str, str]] = frozenset({("H200", "2.11")})
"""The GPUs and versions of torch on which the bytes of compiled steps were measured and equal the simulated ones."""


class CompiledCodeError(Exception):
    """Compiled code failed on fake tensors. The step must be measured again with its regions run eagerly."""


class Compilation:
    """The state of all compilations in one simulation.

    ``hidden_from_compilers`` are the simulation's patches that would mislead a compiler: they are off while one runs.
    """

    def __init__(self, tracker: StorageTracker, hidden_from_compilers: Patches) -> None:
        self.tracker, self.hidden_from_compilers = tracker, hidden_from_compilers
        self.doubts: dict[str, None] = {}
        """The notes for all compiled regions, collected while they were compiled."""
        self.assumed: dict[str, None] = {}
        """The assumptions that were made while regions were compiled."""
        self.user_settings: dict[str, Any] = {}
        """The user's values of the settings of Inductor that the simulation switches off."""
        self.is_running = False
        """Whether a compiler runs; any active dispatch mode is then its own."""

    @contextlib.contextmanager
    def simulating(self) -> Iterator[None]:
        """Inside, operators are counted although a compiler is running, because they belong to the step."""
        self.is_running = False
        try:
            with self.hidden_from_compilers, self.tracker.cache.mode, self.tracker:
                yield
        finally:
            self.is_running = True

    def run(self, code: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a compiled graph, or Inductor for a backward, and add the notes of compiled regions to the tracker."""
        tracker = self.tracker
        version = ".".join(torch.__version__.split(".")[:2])
        if (tracker.gpu.name, version) not in COMPARED:
            counted = f"a region under torch.compile is counted as Inductor of torch {version} allocates it"
            tracker.note(counted)
            tracker.of_this_torch.add(counted)
        for doubt in self.doubts:
            tracker.note(doubt)
        tracker.assumed |= self.assumed
        tracker.lines.remember_node()
        try:
            return code(*args, **kwargs)
        except (MeasurementError, CompiledCodeError):
            raise
        except Exception as error:
            raise CompiledCodeError(described(error)) from error


def described(error: Exception) -> str:
    """Return the error on one line; of one that a compiler wraps, what it wraps."""
    while isinstance(cause := getattr(error, "inner_exception", None), Exception):
        error = cause
    first_line = (str(error).splitlines() or [""])[0][:160]
    return f"{type(error).__name__}: {first_line}"
