"""The config of a run. An incident declares its ``model`` and ``data`` sections; the other sections are shared."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from ..errors import UsageError
from .schema import setting

PRECISIONS = ("float32", "bfloat16", "float16", "autocast", "pure_bfloat16")


@dataclass(frozen=True)
class DataConfig:
    """The ``data`` keys of every incident. An incident's ``data_schema`` may add keys."""

    seed: int = setting(0, low=0, about="seed of the synthetic data, or of the order in which a file is read")


@dataclass(frozen=True)
class TrainingConfig:
    """The ``training`` section: steps, batch sizes and precision."""

    steps: int | None = setting(None, low=1, about="optimizer steps in all, including those before a resume")
    epochs: int | None = setting(
        None, low=1, about="passes over data that end; with steps too, the run ends at the first limit that is reached"
    )
    batch_size: int = setting(1, low=1, about="examples per forward on each process")
    batch_tokens: int | None = setting(
        None, low=1, about="tokens per forward, instead of batch_size; a multiple of data.context_length"
    )
    gradient_accumulation_steps: int = setting(1, low=1, about="forward and backward passes per optimizer step")
    gradient_checkpointing: bool = setting(
        False, about="keep only each layer's input for backward and recompute the rest"
    )
    precision: str = setting(
        "float32",
        choices=PRECISIONS,
        about="bfloat16 and float16 compute with copies of float32 parameters; autocast runs float32 parameters "
        "under torch.autocast; pure_bfloat16 also stores parameters and optimizer states in bfloat16",
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), about="auto uses a GPU if there is one")
    seed: int = setting(0, low=0, about="seed of the initial parameters and of dropout")
    log_every: int = setting(1, low=1, about="steps between two lines of progress")

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError(
                "give steps, the number of optimizer steps, or epochs, the number of passes over data that end"
            )
        if self.batch_tokens is not None and self.batch_size != 1:
            raise ValueError("batch_tokens replaces batch_size: give one of them")


@dataclass(frozen=True)
class OptimizerConfig:
    """The ``optimizer`` section: AdamW, a linear warmup, then a cosine decay to a fraction of the learning rate."""

    learning_rate: float = setting(3e-4, above=0, about="the highest learning rate, which the warmup ends at")
    warmup_steps: int = setting(0, low=0, about="steps in which the learning rate rises")
    final_fraction: float = setting(
        0.1, low=0, high=1, about="the learning rate at the end, as a fraction of the highest"
    )
    weight_decay: float = setting(0.1, low=0, about="weight decay of matrices; vectors have none")
    beta1: float = setting(0.9, low=0, below=1, about="decay rate of the mean of the gradients")
    beta2: float = setting(0.95, low=0, below=1, about="decay rate of the mean of the squared gradients")
    eps: float = setting(1e-8, above=0, about="added to the denominator of an update, against a division by zero")
    fused: bool = setting(
        False, about="use AdamW's fused kernel, which needs no temporaries, instead of operators on lists of tensors"
    )
    clip_norm: float | None = setting(1.0, above=0, about="largest norm of all gradients together; null: no clipping")


@dataclass(frozen=True)
class ReportSwitches:
    """The ``optimization`` section. It has no keys of its own; an incident's ``optimization_schema`` adds the switches
    that its report names."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The ``checkpoint`` section: where and how often the run is saved."""

    path: str | None = setting(None, about="the checkpoint file, which each save replaces; null: the run is not saved")
    every: int = setting(100, low=1, about="steps between two saves; the last step is always saved")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. ``model``, ``data`` and ``optimization`` are instances of the incident's own sections."""

    model: Any
    data: Any
    training: TrainingConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    optimization: Any = field(default_factory=ReportSwitches)
    name: str = field(default="", compare=False)
    """The name of the config file, without its suffix."""

    def __post_init__(self) -> None:
        tokens, length = self.training.batch_tokens, self.context_length
        if tokens is None:
            return
        if length is None:
            raise UsageError(
                "training.batch_tokens counts tokens, but these data are not tokens: use training.batch_size"
            )
        if tokens % length:
            raise UsageError(
                f"training.batch_tokens must be a multiple of data.context_length, {length}, got {tokens}: "
                "a forward takes whole sequences"
            )

    @property
    def context_length(self) -> int | None:
        """Tokens per example; None if the data are not tokens."""
        return getattr(self.data, "context_length", None)

    @property
    def batch_size(self) -> int:
        """Examples per forward on each process."""
        tokens = self.training.batch_tokens
        return self.training.batch_size if tokens is None else tokens // self.data.context_length

    def value(self, key: str) -> Any:
        """The value of a ``section.key``."""
        section, name = key.split(".")
        return getattr(getattr(self, section), name)

    def replaced(self, values: dict[str, Any]) -> RunConfig:
        """A copy with other values, keyed by ``section.key``."""
        changed = self
        for key, value in values.items():
            section, name = key.split(".")
            try:
                part = dataclasses.replace(getattr(changed, section), **{name: value})
            except ValueError as error:
                raise UsageError(f"{key}={value}: {error}") from None
            changed = dataclasses.replace(changed, **{section: part})
        return changed

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Every section as a dict."""
        found = dataclasses.asdict(self)
        del found["name"]
        return found
