"""The training loop of all incidents, with checkpoints to resume from."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import MeasurementError, UsageError
from ..meters.resident import process_peak_bytes
from ..progress import Say, silent
from . import checkpoint_file
from .config import OptimizerConfig, RunConfig
from .distributed import World
from .examples import Examples
from .incident import Batch, Incident
from .loss_scale import LossScale
from .schema import differences
from .step import TrainStep, set_options


@dataclass(frozen=True)
class StepReport:
    """The report of an optimizer step; ``step`` counts from 1."""

    step: int
    steps: int  # in all
    loss: float  # mean over the step's targets, with the parameters before the step
    num_targets: int
    learning_rate: float
    gradient_norm: float  # before clipping
    loss_scale: float | None  # during the step; None if the loss is not scaled
    skipped: bool  # no parameter changed, because the gradients overflowed
    elapsed_s: float
    examples_per_s: float  # of all processes together
    tokens_per_s: float | None  # of all processes together; None if the data are not tokens
    peak_bytes: int  # of the process with the highest peak
    peak_meter: str


def train(
    incident: Incident,
    config: RunConfig,
    world: World,
    *,
    resume: Path | None = None,
    say: Say = silent,
) -> Iterator[StepReport]:
    """Train for ``training.steps`` or ``training.epochs`` and yield a report after each step.

    Every process of ``world`` must call this. ``resume`` is a checkpoint to resume from, with any number of processes;
    ``say`` is called with each key of the config that changed since.
    """
    path = config.checkpoint.path
    if path is not None and Path(path).is_dir():
        raise UsageError(f"checkpoint.path must be a file, got the folder {path}")
    run = Run(incident, config, world)
    if resume is not None:
        for line in run.resume(resume):
            say(line)
    while run.step < run.steps:
        report = run.take_step()
        if path is not None and (run.step % config.checkpoint.every == 0 or run.step == run.steps):
            run.save(Path(path))
        yield report


class Run:
    """A model in training: its parameters, its optimizer, and its position in the data."""

    def __init__(self, incident: Incident, config: RunConfig, world: World) -> None:
        self.incident, self.config, self.world = incident, config, world
        self.steps = self._steps_in_all()
        self.step = self.examples = self.num_targets = 0
        self._batch = incident.data(config)
        # on the CPU, so that the initial parameters do not depend on the device or the number of processes
        torch.manual_seed(config.training.seed)
        self.train_step = TrainStep(incident, config, world)
        self.model, self.optimizer = self.train_step.model, self.train_step.optimizer
        # from here on each process draws its own random numbers
        torch.manual_seed(config.training.seed + world.rank)

    def take_step(self) -> StepReport:
        """Run one optimizer step."""
        started = time.perf_counter()
        _reset_peak(self.world.device)
        batches = list(self._batches())
        (num_targets,) = self.world.sums(sum(map(self.incident.num_targets, batches)))
        rate = learning_rate(self.config.optimizer, self.steps, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        scale = self.train_step.loss_scale.scale if self.train_step.loss_scale else None
        loss = norm = math.nan

        def accept(loss_sum: torch.Tensor, norm_before: torch.Tensor) -> bool:
            nonlocal loss, norm
            loss, norm = self.world.sums(loss_sum.item())[0] / num_targets, norm_before.item()
            return self._is_finite(loss, norm, scale)

        self.train_step.take(batches, num_targets, accept)
        num_examples = self._examples_a_step()
        self.step += 1
        self.examples += num_examples
        self.num_targets += int(num_targets)
        own_peak, peak_meter = _peak(self.world.device)
        peak_bytes = self.world.largest(own_peak)  # also waits for the GPU, so that its work is in elapsed_s
        elapsed_s = time.perf_counter() - started
        length = self.config.context_length
        return StepReport(
            step=self.step,
            steps=self.steps,
            loss=loss,
            num_targets=int(num_targets),
            learning_rate=rate,
            gradient_norm=norm,
            loss_scale=scale,
            skipped=not (math.isfinite(loss) and math.isfinite(norm)),
            elapsed_s=elapsed_s,
            examples_per_s=num_examples / elapsed_s,
            tokens_per_s=None if length is None else num_examples * length / elapsed_s,
            peak_bytes=peak_bytes,
            peak_meter=peak_meter,
        )

    def _is_finite(self, loss: float, norm: float, scale: float | None) -> bool:
        """Whether the step can be taken. Stops the run where a smaller loss scale cannot help."""
        is_finite = math.isfinite(loss) and math.isfinite(norm)
        if not is_finite and (scale is None or scale <= 1):
            scaled = "" if scale is None else f", loss scale {scale:g}"
            raise MeasurementError(f"step {self.step + 1}: loss {loss}, gradient norm {norm}{scaled}; training stopped")
        return is_finite

    def save(self, path: Path) -> None:
        """Write the run to a file. Every process must call this."""
        model, optimizer = checkpoint_file.whole_state(self.model, self.optimizer)
        random = checkpoint_file.random_states(self.world)
        if self.world.is_first:
            checkpoint_file.write_checkpoint(
                path,
                checkpoint_file.Checkpoint(
                    incident=self.incident.name,
                    config=self.config.as_dict(),
                    step=self.step,
                    examples=self.examples,
                    num_targets=self.num_targets,
                    random=random,
                    model=model,
                    optimizer=optimizer,
                    loss_scale=vars(self.train_step.loss_scale) if self.train_step.loss_scale else {},
                ),
            )

    def resume(self, path: Path) -> list[str]:
        """Load a saved run, and return messages about what changed."""
        checkpoint = checkpoint_file.read_checkpoint(path, map_only=self.world.size > 1)
        changed = self._require_ours(path, checkpoint)
        checkpoint_file.put_state(self.model, self.optimizer, checkpoint)
        # loading the optimizer's state has set the options that the file was saved with
        set_options(self.optimizer, self.config.optimizer)
        checkpoint_file.put_random_state(self.world, checkpoint)
        if self.train_step.loss_scale is not None:
            self.train_step.loss_scale = LossScale(**checkpoint.loss_scale)
        self.step, self.examples, self.num_targets = checkpoint.step, checkpoint.examples, checkpoint.num_targets
        lines = [f"resumed from {path} after step {self.step}, {self.num_targets:,} targets"]
        return lines + [f"changed since: {key} {change}" for key, change in changed.items()]

    def _require_ours(self, path: Path, checkpoint: checkpoint_file.Checkpoint) -> dict[str, str]:
        """Refuse a file of another run. Returns the keys that changed since it was saved."""
        if checkpoint.incident != self.incident.name:
            raise UsageError(f"{path}: saved by a run of {checkpoint.incident}, not of {self.incident.name}")
        changed = differences(checkpoint.config, self.config.as_dict())
        other_data = [f"{key} {change}" for key, change in changed.items() if key.startswith("data.")]
        if other_data:
            raise UsageError(
                f"{path}: saved with other data, in which its position has no meaning: {', '.join(other_data)}"
            )
        if checkpoint.step >= self.steps:
            key = "steps" if self.steps == self.config.training.steps else "epochs"
            raise UsageError(f"{path}: {checkpoint.step} of {self.steps} steps are done; raise training.{key}")
        ours = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint.model.items()}
        for name in {**ours, **theirs}:
            if ours.get(name) != theirs.get(name):
                raise UsageError(
                    f"{path}: saved with another model: {name} is {_shown(theirs.get(name))} in the file, "
                    f"{_shown(ours.get(name))} in this model"
                )
        return changed

    def _batches(self) -> Iterator[Batch]:
        """This process's batches of the step."""
        batch_size = self.config.batch_size
        for forward in range(self.config.training.gradient_accumulation_steps):
            first = self.examples + (forward * self.world.size + self.world.rank) * batch_size
            yield self._batch(Examples(range(first, first + batch_size), self.config.data.seed))

    def _steps_in_all(self) -> int:
        training, per_epoch = self.config.training, self.incident.examples_per_epoch
        limits = [] if training.steps is None else [training.steps]
        if training.epochs is not None:
            if per_epoch is None:
                raise UsageError(f"training.epochs: the data of {self.incident.name} do not end; use training.steps")
            limits.append(math.ceil(training.epochs * per_epoch(self.config) / self._examples_a_step()))
        return min(limits)

    def _examples_a_step(self) -> int:
        training = self.config.training
        return self.config.batch_size * training.gradient_accumulation_steps * self.world.size


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The learning rate after ``step`` steps: a linear warmup, then a cosine decay."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    past = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    fraction = config.final_fraction + (1 - config.final_fraction) * (1 + math.cos(math.pi * past)) / 2
    return config.learning_rate * fraction


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> tuple[int, str]:
    """The peak, of the step on a GPU or of the whole process so far on a CPU, and the name of its meter."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), "cuda"
    return process_peak_bytes(), "host RSS"


def _shown(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(list(shape))
