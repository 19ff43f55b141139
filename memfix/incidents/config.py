"""One schema for every training run. An incident brings the dataclass of its ``model`` section; the rest is shared."""

from __future__ import annotations

import dataclasses
import importlib.resources
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import UsageError, did_you_mean
from . import require_incident
from .schema import read_sections, setting


@dataclass(frozen=True)
class DataConfig:
    """Where tokens come from. A sequence is ``context_length`` inputs, each with the token after it as its target."""

    context_length: int = setting(low=1, about="tokens of a sequence")
    source: str = setting(
        "markov", choices=("markov", "file"), about="a synthetic stream that can be learnt, or a file of token ids"
    )
    seed: int = setting(0, low=0, about="of the synthetic stream, or of the order in which a file is read")
    states: int = setting(64, low=2, about="markov: tokens of the vocabulary that occur")
    branching: int = setting(4, low=1, about="markov: tokens that can follow a token; the loss can fall to its log")
    path: str | None = setting(None, about="file: ids as .npy, or raw as .bin")
    dtype: str = setting("uint16", choices=("uint16", "int32", "int64"), about="file: type of the ids in a .bin")
    prompt_fraction: float = setting(
        0.0, low=0, below=1, about="targets at the start of a sequence are ignored, up to this part of it"
    )

    def __post_init__(self) -> None:
        if (self.source == "file") != (self.path is not None):
            raise ValueError("path is the file to read: it goes with source: file, and only with it")
        if self.branching > self.states:
            raise ValueError(f"branching must be at most states, {self.states}, got {self.branching}")


@dataclass(frozen=True)
class TrainingConfig:
    """How long, how much at a time, and in which arithmetic."""

    steps: int = setting(low=1, about="optimizer steps in all, those before a resume included")
    batch_size: int = setting(1, low=1, about="sequences of one forward, on each process")
    batch_tokens: int | None = setting(
        None, low=1, about="tokens of one forward, in place of batch_size: so many sequences of data.context_length"
    )
    gradient_accumulation_steps: int = setting(1, low=1, about="forwards and backwards of one optimizer step")
    gradient_checkpointing: bool = setting(False, about="keep the inputs of each layer and compute the rest again")
    precision: str = setting(
        "float32",
        choices=("float32", "bfloat16"),
        about="of forward and backward; parameters, gradient sums and optimizer are float32 in both",
    )
    device: str = setting("auto", choices=("auto", "cpu", "cuda"), about="auto: the GPU where there is one")
    seed: int = setting(0, low=0, about="of the first parameters")
    log_every: int = setting(1, low=1, about="steps from one line of progress to the next")

    def __post_init__(self) -> None:
        if self.batch_tokens is not None and self.batch_size != 1:
            raise ValueError("batch_tokens stands in place of batch_size: give one of them")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, with a linear warmup and then a cosine down to a fraction of the learning rate."""

    learning_rate: float = setting(3e-4, above=0, about="at its highest")
    warmup_steps: int = setting(0, low=0, about="steps over which the learning rate rises")
    final_fraction: float = setting(0.1, low=0, high=1, about="of the learning rate that the cosine ends at")
    weight_decay: float = setting(0.1, low=0, about="of matrices; vectors are left alone")
    beta1: float = setting(0.9, low=0, below=1, about="decay of the mean of gradients")
    beta2: float = setting(0.95, low=0, below=1, about="decay of the mean of squares")
    eps: float = setting(1e-8, above=0, about="added to the root of the mean of squares")
    clip_norm: float | None = setting(1.0, above=0, about="largest norm of all gradients together; null: no limit")


@dataclass(frozen=True)
class CheckpointConfig:
    """Where the run can be taken up again."""

    path: str | None = setting(None, about="file that is replaced at each save; null: no file")
    every: int = setting(100, low=1, about="steps from one save to the next; the last step is always saved")


@dataclass(frozen=True)
class RunConfig:
    """A whole run. ``model`` is an instance of the incident's own section."""

    model: Any
    data: DataConfig
    training: TrainingConfig
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig

    def __post_init__(self) -> None:
        tokens, length = self.training.batch_tokens, self.data.context_length
        if tokens is not None and tokens % length:
            raise UsageError(
                f"training.batch_tokens must be a multiple of data.context_length, {length}, got {tokens}: "
                "a forward takes whole sequences"
            )

    @property
    def batch_size(self) -> int:
        """Sequences of one forward, on each process."""
        tokens = self.training.batch_tokens
        return self.training.batch_size if tokens is None else tokens // self.data.context_length

    def as_dict(self) -> dict[str, dict[str, Any]]:
        return dataclasses.asdict(self)


def load_config(path: Path, model_schema: type[Any], overrides: Iterable[str] = ()) -> RunConfig:
    """The run that ``path`` describes, with ``section.key=value`` in place of what it says."""
    return RunConfig(**read_sections(path, sections(model_schema), overrides))


def find_config(incident: str, path: Path) -> Path:
    """``path`` where there is such a file; else the config of that name which comes with the incident."""
    if path.exists():
        return path
    folder = Path(str(importlib.resources.files(f"{__package__}.{require_incident(incident)}") / "configs"))
    own = sorted(file.name for file in folder.glob("*.yaml"))
    if str(path) not in own:
        raise UsageError(
            f"no config file {path}, and {incident} brings none of that name{did_you_mean(str(path), own)}"
        )
    return folder / path


def sections(model_schema: type[Any]) -> dict[str, type[Any]]:
    """The dataclass of each section, in the order of a file."""
    return {
        "model": model_schema,
        "data": DataConfig,
        "training": TrainingConfig,
        "optimizer": OptimizerConfig,
        "checkpoint": CheckpointConfig,
    }
