"""A callback that watches memory in the ``Trainer`` of transformers."""

from __future__ import annotations

import sys
from typing import Any

from transformers import TrainerCallback

from ..watch import WatchReport
from .training_watch import WatchingCallback


class WatchCallback(WatchingCallback, TrainerCallback):
    """Watches training: ``Trainer(..., callbacks=[WatchCallback()])``. Options are those of :func:`memfix.watch`.

    The stages are ``forward``, ``backward`` and ``optimizer`` of each step, and ``validation``. When training ends, the
    first rank passes the report to ``say``. The trainer does not pass exceptions to callbacks, so a failed allocation
    is explained on stderr when it happens.
    """

    _hooks: tuple[Any, ...] = ()

    @staticmethod
    def _on_failure(report: WatchReport) -> None:
        print(report, file=sys.stderr, flush=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self._remove_hooks()
        self._training.begin()
        # hooks would cause graph breaks in compiled code, so compiled models have one stage for forward and backward
        if model is not None and not getattr(args, "torch_compile", False):
            self._hooks = (
                model.register_forward_pre_hook(self._before_forward, prepend=True),
                model.register_forward_hook(self._after_forward),
            )

    def _before_forward(self, model: Any, inputs: Any) -> None:
        if model.training:
            self._training.watch.enter_stage("forward")

    def _after_forward(self, model: Any, inputs: Any, output: Any) -> None:
        if model.training:
            self._training.watch.enter_stage("backward")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.watch.enter_stage(None if self._hooks else "forward and backward")

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._hooks:
            self._training.watch.enter_stage(None)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.watch.enter_stage("optimizer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.watch.enter_stage(None)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.watch.step()
        self._expect_validation(control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._expect_validation(control)

    def _expect_validation(self, control: Any) -> None:
        # no callback marks the start of a validation; the trainer's own callbacks set should_evaluate before this one
        if control.should_evaluate:
            self._training.begin_validation()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._training.end_validation()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._remove_hooks()
        self._training.end(is_first_rank=state.is_world_process_zero)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = ()
