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

    seed: int = setting(0, low=0, about="of what is drawn: synthetic data, or the order in which a file is read")


@dataclass(frozen=True)
class TrainingConfig:
    """The ``training`` section: steps, batch sizes and precision."""

    steps: int | None = setting(None, low=1, about="optimizer steps in all, those before a resume included")
    epochs: int | None = setting(None, low=1, about="times through data that end; with steps, whichever ends first")
    batch_size: int = setting(1, low=1, about="examples of one forward, on each process")
    batch_tokens: int | None = setting(
        None, low=1, about="tokens of one forward, in place of batch_size: so many sequences of data.context_length"
    )
    gradient_accumulation_steps: int = setting(1, low=1, about="forwards and backwards of one optimizer step")
    gradient_checkpointing: bool = setting(False, about="keep the inputs of each layer and compute the rest again")
    precision: str = setting(
        "float32",
        choices=PRECISIONS,
        about="bfloat16, float16: computes with copies of float32 parameters; autocast: float32 parameters under "
        "autocast; pure_bfloat16: parameters, gradients and optimizer states too",
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), about="auto: the GPU where there is one")
    seed: int = setting(0, low=0, about="of the first parameters")
    log_every: int = setting(1, low=1, about="steps from one line of progress to the next")

    def __post_init__(self) -> None:
        if self.steps is None and self.epochs is None:
            raise ValueError("give steps, optimizer steps in all, or epochs of data that end")
        if self.batch_tokens is not None and self.batch_size != 1:
            raise ValueError("batch_tokens stands in place of batch_size: give one of them")


@dataclass(frozen=True)
class OptimizerConfig:
    """The ``optimizer`` section: AdamW, a linear warmup, then a cosine decay to a fraction of the learning rate."""

    learning_rate: float = setting(3e-4, above=0, about="at its highest")
    warmup_steps: int = setting(0, low=0, about="steps over which the learning rate rises")
    final_fraction: float = setting(0.1, low=0, high=1, about="of the learning rate that the cosine ends at")
    weight_decay: float = setting(0.1, low=0, about="of matrices; vectors are left alone")
    beta1: float = setting(0.9, low=0, below=1, about="decay of the mean of gradients")
    beta2: float = setting(0.95, low=0, below=1, about="decay of the mean of squares")
    eps: float = setting(1e-8, above=0, about="added to the root of the mean of squares")
    fused: bool = setting(False, about="one kernel without temporaries, in place of operators on lists of tensors")
    clip_norm: float | None = setting(1.0, above=0, about="largest norm of all gradients together; null: no limit")


@dataclass(frozen=True)
class OptimizationConfig:
    """The ``optimization`` section. It has no keys of its own; an incident's ``optimization_schema`` adds the switches
    that its report names."""


@dataclass(frozen=True)
class CheckpointConfig:
    """The ``checkpoint`` section: where and how often the run is saved."""

    path: str | None = setting(None, about="file that is replaced at each save; null: no file")
    every: int = setting(100, low=1, about="steps from one save to the next; the last step is always saved")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. ``model``, ``data`` and ``optimization`` are instances of the incident's own sections."""

    model: Any
    data: Any
    training: TrainingConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig
    optimization: Any = field(default_factory=OptimizationConfig)
    name: str = field(default="", compare=False)
    """The name of the config file, without its suffix."""

    def __post_init__(self) -> None:
        tokens, length = self.training.batch_tokens, self.context_length
        if tokens is None:
            return
        if length is None:
            raise UsageError("training.batch_tokens counts tokens, and this data has none: use training.batch_size")
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
