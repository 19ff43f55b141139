"""The one training loop of all incidents.

One optimizer step takes the gradient of many sequences: ``gradient_accumulation_steps`` forwards of ``batch_size``
sequences on each process. Its loss is the mean over all their targets that are not ignored, wherever they are: every
forward gives a sum, and all sums are divided by the one count. A mean of the forwards' means would count a target
the more, the fewer its forward has.

``precision: bfloat16`` means: parameters, gradient sums and optimizer are float32; forward and backward run with a
bfloat16 copy of the parameters, so that all activations are bfloat16 too. (Autocast would leave what comes out of the
embedding, and with it every layer's kept input, in float32.) Each backward's bfloat16 gradient is added up in float32.
"""

# B sequences of a forward, T tokens of one

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import MeasurementError, UsageError
from ..meters.stages import stage
from .checkpoint_file import (
    Checkpoint,
    put_random_state,
    put_state,
    random_states,
    read_checkpoint,
    whole_state,
    write_checkpoint,
)
from .config import OptimizerConfig, RunConfig
from .distributed import World, spread
from .profile import BACKWARD
from .schema import differences
from .tokens import IGNORED, batch, open_tokens
from .trainable import Trainable

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class StepReport:
    """What is known after an optimizer step; ``step`` counts from 1."""

    step: int
    loss: float  # mean over the step's targets, with the parameters before the step
    num_targets: int
    learning_rate: float
    gradient_norm: float  # before clipping
    elapsed_s: float
    tokens_per_s: float  # of all processes together
    peak_bytes: int  # of the process that took most
    peak_meter: str


def train(
    incident: str,
    trainable: Trainable,
    config: RunConfig,
    world: World,
    *,
    resume: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[StepReport]:
    """Run until ``training.steps`` are done, a report after each. Every process of ``world`` must call.

    ``resume`` takes up a run from its file, by any number of processes; ``say`` is told what changed since.
    """
    path = config.checkpoint.path
    if path is not None and Path(path).is_dir():
        raise UsageError(f"checkpoint.path must be a file, got the folder {path}")
    run = Run(incident, trainable, config, world)
    if resume is not None:
        for line in run.resume(resume):
            say(line)
    while run.step < config.training.steps:
        report = run.take_step()
        if path is not None and (run.step % config.checkpoint.every == 0 or run.step == config.training.steps):
            run.save(Path(path))
        yield report


class Run:
    """A model in training: parameters, optimizer, and the place in the data."""

    def __init__(self, incident: str, trainable: Trainable, config: RunConfig, world: World) -> None:
        self.incident, self.config, self.world = incident, config, world
        self.step = self.sequences = self.num_targets = 0
        self._tokens = open_tokens(config.data, trainable.vocabulary_size(config.model))
        # on the CPU, so that the first parameters are the same on every device and for any number of processes
        torch.manual_seed(config.training.seed)
        self.model = trainable.build(config.model, config.training)
        compute = COMPUTE_DTYPES[config.training.precision]
        if world.size > 1:
            spread(self.model, trainable.layers(self.model), world, compute)
            compute = torch.float32  # the shards' own matter
        else:
            self.model.to(world.device)
        self._pass = ForwardAndBackward(self.model, trainable.loss_sum, compute)
        self.optimizer = optimizer_of(self.model, config.optimizer)
        # from here on each process draws its own
        torch.manual_seed(config.training.seed + world.rank)

    def take_step(self) -> StepReport:
        """One optimizer step."""
        started = time.perf_counter()
        _reset_peak(self.world.device)
        training, world = self.config.training, self.world
        batches = list(self._batches())
        (targets_of_all,) = world.sums(sum(int((target_BT != IGNORED).sum()) for _, target_BT in batches))
        losses = torch.zeros((), dtype=torch.float64, device=world.device)
        for ids_BT, target_BT in batches:
            losses += self._pass.run(ids_BT.to(world.device), target_BT.to(world.device), targets_of_all)
        loss = world.sums(losses.item())[0] / targets_of_all
        norm = clipped(self.model, self.config.optimizer.clip_norm).item()
        if not math.isfinite(loss) or not math.isfinite(norm):
            # before the step, so that a file saved earlier is the last word on the parameters
            raise MeasurementError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}; training stopped")
        rate = learning_rate(self.config.optimizer, training.steps, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

        num_sequences = self._sequences_a_step()
        self.step += 1
        self.sequences += num_sequences
        self.num_targets += int(targets_of_all)
        own_peak, peak_meter = _peak(world.device)
        peak_bytes = world.largest(own_peak)  # which also waits for the device: its time belongs to the step
        elapsed_s = time.perf_counter() - started
        return StepReport(
            step=self.step,
            loss=loss,
            num_targets=int(targets_of_all),
            learning_rate=rate,
            gradient_norm=norm,
            elapsed_s=elapsed_s,
            tokens_per_s=num_sequences * self.config.data.context_length / elapsed_s,
            peak_bytes=peak_bytes,
            peak_meter=peak_meter,
        )

    def save(self, path: Path) -> None:
        """Write the run to a file; every process must call."""
        model, optimizer = whole_state(self.model, self.optimizer)
        random = random_states(self.world)
        if self.world.is_first:
            write_checkpoint(
                path,
                Checkpoint(
                    incident=self.incident,
                    config=self.config.as_dict(),
                    step=self.step,
                    sequences=self.sequences,
                    num_targets=self.num_targets,
                    random=random,
                    model=model,
                    optimizer=optimizer,
                ),
            )

    def resume(self, path: Path) -> list[str]:
        """Take up what was saved; what is worth telling."""
        checkpoint = read_checkpoint(path, map_only=self.world.size > 1)
        changed = self._require_ours(path, checkpoint)
        put_state(self.model, self.optimizer, checkpoint)
        # the file's own settings came with its state
        _set_up(self.optimizer, self.config.optimizer)
        put_random_state(self.world, checkpoint)
        self.step, self.sequences, self.num_targets = checkpoint.step, checkpoint.sequences, checkpoint.num_targets
        lines = [f"resumed from {path} after step {self.step}, {self.num_targets:,} targets"]
        return lines + [f"changed since: {key} {change}" for key, change in changed.items()]

    def _require_ours(self, path: Path, checkpoint: Checkpoint) -> dict[str, str]:
        """Keys that changed, where they may."""
        if checkpoint.incident != self.incident:
            raise UsageError(f"{path}: a run of {checkpoint.incident}, not of {self.incident}")
        changed = differences(checkpoint.config, self.config.as_dict())
        other_data = [f"{key} {change}" for key, change in changed.items() if key.startswith("data.")]
        if other_data:
            raise UsageError(f"{path}: its place in the data means nothing in other data: {', '.join(other_data)}")
        if checkpoint.step >= self.config.training.steps:
            raise UsageError(
                f"{path}: {checkpoint.step} steps are done and training.steps is {self.config.training.steps}; raise it"
            )
        ours = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise UsageError(
                    f"{path}: another model: {name} is {_shown(theirs.get(name))} there, {_shown(ours.get(name))} here"
                )
        return changed

    def _batches(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This process' share of the step's sequences."""
        batch_size = self.config.batch_size
        for forward in range(self.config.training.gradient_accumulation_steps):
            first = self.sequences + (forward * self.world.size + self.world.rank) * batch_size
            yield batch(self._tokens, self.config.data, first, batch_size)

    def _sequences_a_step(self) -> int:
        training = self.config.training
        return self.config.batch_size * training.gradient_accumulation_steps * self.world.size


class ForwardAndBackward(torch.nn.Module):
    """Both as one call, so that what a checkpointed layer computes again in backward finds the same parameters."""

    def __init__(self, model: torch.nn.Module, loss_sum: Callable[..., torch.Tensor], compute: torch.dtype) -> None:
        super().__init__()
        self.model, self.loss_sum, self.compute = model, loss_sum, compute

    def run(self, ids_BT: torch.Tensor, target_BT: torch.Tensor, targets_of_all: float) -> torch.Tensor:
        """The sum of the losses; the gradient of ``sum / targets_of_all`` is added to the parameters' own."""
        arguments = (ids_BT, target_BT, targets_of_all)
        if self.compute == torch.float32:
            return self(*arguments)
        copies = {name: parameter.to(self.compute) for name, parameter in self.named_parameters()}
        return torch.func.functional_call(self, copies, arguments)

    def forward(self, ids_BT: torch.Tensor, target_BT: torch.Tensor, targets_of_all: float) -> torch.Tensor:
        loss = self.loss_sum(self.model, ids_BT, target_BT)
        stage(BACKWARD)
        (loss / targets_of_all).backward()
        return loss.detach().double()


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """Of the step after ``step`` others: up in a line, then down in half a cosine."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    past = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    fraction = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * past)) / 2
    return config.learning_rate * fraction


def optimizer_of(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """AdamW over the parameters that are trained; only matrices decay."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in parameters if parameter.dim() >= 2]
    vectors = [parameter for parameter in parameters if parameter.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=config.learning_rate)
    _set_up(optimizer, config)
    return optimizer


def _set_up(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> None:
    for group, weight_decay in zip(optimizer.param_groups, (config.weight_decay, 0.0), strict=True):
        group.update(betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=weight_decay)


def clipped(model: torch.nn.Module, clip_norm: float | None) -> torch.Tensor:
    """The norm of all gradients together, before they are scaled to ``clip_norm``."""
    norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf if clip_norm is None else clip_norm)
    # of a sharded model each process has the norm of its part
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> tuple[int, str]:
    """Bytes, and what they are: of the step on a GPU; else of the process since it began."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    import resource
    import sys

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident * (1 if sys.platform == "darwin" else 1024), "host RSS"


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
