"""A callback that watches memory in Lightning's ``Trainer``, from ``lightning`` or ``pytorch_lightning``."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from ..errors import UsageError
from .training_watch import WatchingCallback

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_classes() -> tuple[type, ...]:
    """The ``Callback`` of each package that the program has imported, or else of the first that is installed."""
    names = [name for name in _PACKAGES if name in sys.modules] or [
        name for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None
    ][:1]
    if not names:
        raise UsageError("memfix.integrations.lightning needs Lightning; install lightning or pytorch_lightning")
    return tuple(importlib.import_module(name).Callback for name in names)


class WatchCallback(WatchingCallback, *_callback_classes()):  # type: ignore[misc]
    """Watches ``fit``: ``Trainer(..., callbacks=[WatchCallback()])``. Options are those of :func:`memfix.watch`.

    The stages are ``forward``, ``backward`` and ``optimizer`` of each batch, and ``validation``. When ``fit`` ends, the
    first rank passes the report to ``say``. An out-of-memory error gets the report as a note.
    """

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._training.watch.enter_stage("forward")

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        self._training.watch.enter_stage("backward")

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._training.watch.enter_stage(None)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._training.watch.enter_stage("optimizer")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._training.watch.enter_stage(None)
        self._training.watch.step()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._training.begin_validation()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end_validation()

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self._training.end(is_first_rank=trainer.is_global_zero)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._training.fail(exception)
