"""The one train step of all incidents: ``memfix train`` runs it, ``profile`` measures it and ``fit`` sizes it.

One step accumulates the gradients of several forwards. Its loss is the mean over all targets of all processes: every
forward gives a sum, and all sums are divided by the total count. A mean of the forwards' means would give more weight
to targets of forwards that have few.

``training.precision`` is one of:

========================  ==================  =========================  =================================
precision                 parameters          forward and backward       gradient sums, optimizer states
========================  ==================  =========================  =================================
``float32``               float32             float32                    float32
``bfloat16``              float32             bfloat16, with copies      float32
``autocast``              float32             as autocast chooses        float32
``pure_bfloat16``         bfloat16            bfloat16                   bfloat16
========================  ==================  =========================  =================================

With ``bfloat16`` all activations are bfloat16. Autocast leaves the output of an embedding in float32, and so the input
that each layer keeps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from ..meters.stages import listening, stage
from .config import PRECISIONS, OptimizerConfig, RunConfig
from .distributed import World, shard
from .incident import Batch, Incident
from .profile import BACKWARD, LATER_FORWARDS, OPTIMIZER

Read = TypeVar("Read")


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters and of computation. With ``autocast`` torch chooses the latter for each operator."""

    parameters: torch.dtype
    compute: torch.dtype
    autocast: bool = False

    @property
    def copies_parameters(self) -> bool:
        """Whether a forward runs with copies of the parameters."""
        return self.parameters != self.compute and not self.autocast

    @staticmethod
    def named(name: str) -> Precision:
        """The precision that ``training.precision`` names."""
        narrow, wide = torch.bfloat16, torch.float32
        float32, bfloat16, autocast, pure_bfloat16 = PRECISIONS
        return {
            float32: Precision(wide, wide),
            bfloat16: Precision(wide, narrow),
            autocast: Precision(wide, narrow, autocast=True),
            pure_bfloat16: Precision(narrow, narrow),
        }[name]


class TrainStep:
    """The train step of an incident on one process, with its model and its optimizer.

    The model is built on torch's default device and then moved. ``prepare`` may change it before it is sharded.
    """

    def __init__(
        self,
        incident: Incident,
        config: RunConfig,
        world: World,
        prepare: Callable[[torch.nn.Module], None] = lambda model: None,
    ) -> None:
        self.config, self.world = config, world
        self.model = incident.build(config)
        prepare(self.model)
        precision = Precision.named(config.training.precision)
        self.model.to(precision.parameters)
        if world.size > 1:
            gathered = precision.parameters if precision.autocast else precision.compute
            shard(self.model, incident.layers(self.model), world, gathered=gathered, reduced=precision.parameters)
        else:
            self.model.to(world.device)
        self._pass = ForwardAndBackward(self.model, incident.loss, precision, world)
        self.optimizer = adamw(self.model, config.optimizer)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of this process's parameters."""
        return sum(getattr(parameter, "_local_tensor", parameter).nbytes for parameter in self.model.parameters())

    def take(
        self, batches: Iterable[Batch], num_targets: float, read: Callable[[torch.Tensor, torch.Tensor], Read]
    ) -> Read:
        """Run one step. ``read`` gets the sum of losses and the gradients' norm before any parameter changes."""
        loss_sum = self.accumulate(batches, num_targets)
        stage(OPTIMIZER)
        norm = clipped(self.model, self.config.optimizer.clip_norm)
        seen = read(loss_sum, norm)
        del loss_sum, norm
        self.optimizer.step()
        self.forget_gradients()
        return seen

    def accumulate(self, batches: Iterable[Batch], num_targets: float) -> torch.Tensor:
        """Run forward and backward of each batch. Returns the sum of losses; gradients are of ``sum / num_targets``."""
        loss_sum: torch.Tensor | None = None
        for number, batch in enumerate(batches):
            if number == 1:
                stage(LATER_FORWARDS)
            with listening(None) if number else contextlib.nullcontext():
                one = self._pass.run(on_device(batch, self.world.device), num_targets)
            loss_sum = one if loss_sum is None else loss_sum + one
        assert loss_sum is not None, "a step has at least one forward"
        return loss_sum

    def forget_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class ForwardAndBackward(torch.nn.Module):
    """Runs forward and backward in one call, so that a checkpointed layer recomputes with the same parameters."""

    def __init__(
        self, model: torch.nn.Module, loss: Callable[..., torch.Tensor], precision: Precision, world: World
    ) -> None:
        super().__init__()
        self.model, self._loss, self._precision, self._world = model, loss, precision, world

    def run(self, batch: Batch, num_targets: float) -> torch.Tensor:
        """Return the sum of the losses, and add the gradient of ``sum / num_targets`` to the parameters' gradients."""
        # a sharded model casts its parameters when it gathers them
        if self._world.size > 1 or not self._precision.copies_parameters:
            return self(batch, num_targets)
        copies = {name: parameter.to(self._precision.compute) for name, parameter in self.named_parameters()}
        return torch.func.functional_call(self, copies, (batch, num_targets))

    def forward(self, batch: Batch, num_targets: float) -> torch.Tensor:
        device = self._world.device.type
        with torch.autocast(device, self._precision.compute) if self._precision.autocast else contextlib.nullcontext():
            loss = self._loss(self.model, batch)
        stage(BACKWARD)
        (loss / num_targets).backward()
        return loss.detach().double()


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor moved to ``device``."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with ``change`` applied to every tensor. A tensor that occurs twice is changed once, and stays one."""
    changed: dict[int, torch.Tensor] = {}

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in changed:
            changed[id(leaf)] = change(leaf)
        return changed[id(leaf)]

    return _pytree.tree_map(of, batch)


def adamw(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW for the trainable parameters, with weight decay for matrices only."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    groups = [{"params": matrices}, {"params": vectors}]
    optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, fused=config.fused or None)
    set_options(optimizer, config)
    return optimizer


def set_options(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    """Set the options of :func:`adamw`'s parameter groups from ``config``."""
    for group, weight_decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=weight_decay)


def clipped(model: torch.nn.Module, clip_norm: float | None) -> torch.Tensor:
    """Clip the gradients to ``clip_norm`` and return their norm before."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
    # in a sharded model each process has the norm of its shard
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
