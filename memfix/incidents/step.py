"""The one train step of all incidents: ``memfix train`` runs it, ``profile`` measures it and ``fit`` sizes it.

One step accumulates the gradients of several forwards. Its loss is the mean over all targets of all processes: every
forward gives a sum, and all sums are divided by the total count. A mean of per-forward means would give a target more
weight the fewer targets its forward has.

``training.precision`` is one of:

========================  ==================  =========================  =================================
precision                 parameters          forward and backward       gradient sums, optimizer states
========================  ==================  =========================  =================================
``float32``               float32             float32                    float32
``bfloat16``              float32             bfloat16, with copies      float32
``float16``               float32             float16, with copies       float32
``autocast``              float32             as autocast chooses        float32
``pure_bfloat16``         bfloat16            bfloat16                   bfloat16
========================  ==================  =========================  =================================

With ``bfloat16`` and ``float16`` all activations are in that dtype, and so are frozen parameters, which need no float32
copy. With ``float16`` the loss is scaled, and a step whose gradients overflow is skipped. With ``autocast`` the output
of an embedding stays in float32, and so does the input that each layer keeps for backward.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree

from ..meters.stages import listening, stage
from .config import PRECISIONS, OptimizerConfig, RunConfig
from .distributed import World, shard
from .incident import Batch, Incident
from .loss_scale import LossScale
from .profile import BACKWARD, LATER_FORWARDS, OPTIMIZER


@dataclass(frozen=True)
class Precision:
    """The dtypes of parameters and of computation. With ``autocast`` torch chooses the latter for each operator."""

    parameters: torch.dtype
    compute: torch.dtype
    autocast: bool = False

    @property
    def copies_parameters(self) -> bool:
        """Whether a forward casts the trained parameters to copies in the compute dtype."""
        return self.parameters != self.compute and not self.autocast

    @property
    def frozen(self) -> torch.dtype:
        """The dtype of parameters that do not train."""
        return self.compute if self.copies_parameters else self.parameters

    @staticmethod
    def named(name: str) -> Precision:
        """The precision that ``training.precision`` names."""
        narrow, wide = torch.bfloat16, torch.float32
        float32, bfloat16, float16, autocast, pure_bfloat16 = PRECISIONS
        return {
            float32: Precision(wide, wide),
            bfloat16: Precision(wide, narrow),
            float16: Precision(wide, torch.float16),
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
        incident.require_device(config, world.device)
        self.model = incident.build(config)
        prepare(self.model)
        precision = Precision.named(config.training.precision)
        cast_parameters(self.model, precision)
        if world.size > 1:
            gathered = precision.parameters if precision.autocast else precision.compute
            shard(self.model, incident.layers(self.model), world, gathered=gathered, reduced=precision.parameters)
        else:
            self.model.to(world.device)
        self._pass = ForwardAndBackward(self.model, incident.loss, precision, world)
        self.optimizer = adamw(self.model, config.optimizer)
        self.loss_scale = LossScale() if precision.compute == torch.float16 else None

    @property
    def parameter_bytes(self) -> int:
        """The bytes of this process's parameters and buffers."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)

    def take(
        self, batches: Iterable[Batch], num_targets: float, accept: Callable[[torch.Tensor, torch.Tensor], bool]
    ) -> None:
        """Run one step. ``accept`` gets the sum of losses and the gradients' norm before any parameter changes.

        If it returns False, no parameter changes and the loss scale falls.
        """
        loss_sum = self.accumulate(batches, num_targets)
        stage(OPTIMIZER)
        if self.loss_scale is not None:
            self.loss_scale.unscale(self.model)
        norm = clipped(self.model, self.config.optimizer.clip_norm)
        is_accepted = accept(loss_sum, norm)
        del loss_sum, norm
        if is_accepted:
            self.optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.update(overflowed=not is_accepted)
        self.forget_gradients()

    def accumulate(self, batches: Iterable[Batch], num_targets: float) -> torch.Tensor:
        """Run forward and backward of each batch. Returns the sum of losses.

        The gradients are those of ``sum / num_targets``, times the loss scale if there is one.
        """
        loss_sum: torch.Tensor | None = None
        divisor = num_targets if self.loss_scale is None else num_targets / self.loss_scale.scale
        for number, batch in enumerate(batches):
            if number == 1:
                stage(LATER_FORWARDS)
            with listening(None) if number else contextlib.nullcontext():
                one = self._pass.run(on_device(batch, self.world.device), divisor)
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

    def run(self, batch: Batch, divisor: float) -> torch.Tensor:
        """Return the sum of the losses, and add the gradient of ``sum / divisor`` to the parameters' gradients."""
        # a sharded model casts its parameters when it gathers them
        if self._world.size > 1 or not self._precision.copies_parameters:
            return self(batch, divisor)
        copies = {
            name: parameter.to(self._precision.compute)
            for name, parameter in self.named_parameters()
            if parameter.requires_grad
        }
        return torch.func.functional_call(self, copies, (batch, divisor))

    def forward(self, batch: Batch, divisor: float) -> torch.Tensor:
        device = self._world.device.type
        with torch.autocast(device, self._precision.compute) if self._precision.autocast else contextlib.nullcontext():
            loss = self._loss(self.model, batch)
        stage(BACKWARD)
        (loss / divisor).backward()
        return loss.detach().double()


def cast_parameters(model: torch.nn.Module, precision: Precision) -> None:
    """Cast parameters in place. Buffers keep their dtype."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(precision.parameters if parameter.requires_grad else precision.frozen)


def on_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor moved to ``device``."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def map_tensors(batch: Batch, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
    """The batch with ``change`` applied to every tensor, once to a tensor that occurs twice."""
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
    """Clip the gradients to ``clip_norm`` and return their norm before clipping."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
    # in a sharded model the norm is a DTensor, of which each process has only its part
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
