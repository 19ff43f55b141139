"""The step of ``memfix train`` as something that a meter can measure: the same passes and optimizer, on any tokens."""

# B sequences of a forward, T tokens of one

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import UsageError
from ..meters.base import Step
from ..meters.simulated.assumptions import state_range
from ..meters.stages import listening, stage
from .config import RunConfig
from .profile import LATER_STEP, OPTIMIZER, PARAMETERS
from .trainable import Trainable
from .training import COMPUTE_DTYPES, ForwardAndBackward, clipped, optimizer_of


def require_one_forward(config: RunConfig) -> None:
    """Of several forwards the stages could not be told apart."""
    if config.training.gradient_accumulation_steps > 1:
        raise UsageError("the stages of a step are of one forward: use training.gradient_accumulation_steps=1")


def _as_built(model: torch.nn.Module) -> None:
    pass


class TrainState:
    """A run's model, its optimizer and one batch on ``device``; the batch's values do not matter.

    ``prepare`` may put stand-ins in the place of what is slow to simulate.
    """

    def __init__(
        self,
        trainable: Trainable,
        config: RunConfig,
        device: str,
        prepare: Callable[[torch.nn.Module], None] = _as_built,
    ) -> None:
        self._config = config
        vocabulary_size, shape = (
            trainable.vocabulary_size(config.model),
            (config.batch_size, config.data.context_length),
        )
        with torch.device(device):
            self.model = trainable.build(config.model, config.training)
            self._ids_BT, self._target_BT = (torch.randint(vocabulary_size, shape) for _ in range(2))
        state_range(self._target_BT, 0, vocabulary_size)
        prepare(self.model)
        self._pass = ForwardAndBackward(self.model, trainable.loss_sum, COMPUTE_DTYPES[config.training.precision])
        self._optimizer = optimizer_of(self.model, config.optimizer)

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self.model.parameters())

    def backward(self) -> None:
        """Forward and backward of the batch."""
        self._pass.run(self._ids_BT, self._target_BT, self._target_BT.numel())

    def train(self) -> None:
        """One step, of which nothing stays but parameters and the optimizer's states."""
        self.backward()
        stage(OPTIMIZER)
        clipped(self.model, self._config.optimizer.clip_norm)
        self._optimizer.step()
        self.forget_gradients()

    def forget_gradients(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class RepeatedStep:
    """Builds the step that a run does over and over: the optimizer's states are there already."""

    trainable: Trainable
    config: RunConfig
    prepare: Callable[[torch.nn.Module], None] = _as_built

    def __call__(self, device: str) -> Step:
        return TrainState(self.trainable, self.config, device, self.prepare).train


@dataclass
class StagedStep:
    """Builds the first step of a run in its stages, and one more: by then the optimizer's states are there."""

    trainable: Trainable
    config: RunConfig
    prepare: Callable[[torch.nn.Module], None] = _as_built
    parameter_bytes: int = 0
    """Of the model, once it is built."""

    def __call__(self, device: str) -> Step:
        state = TrainState(self.trainable, self.config, device, self.prepare)
        self.parameter_bytes = state.parameter_bytes
        is_warm = False

        def step() -> None:
            nonlocal is_warm
            if not is_warm:
                # no optimizer: what is measured is the first step
                state.backward()
                state.forget_gradients()
                is_warm = True
                return
            stage(PARAMETERS)
            state.train()
            stage(LATER_STEP)
            with listening(None):
                state.train()

        return step
