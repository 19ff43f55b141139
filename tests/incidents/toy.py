"""A language model of a few hundred parameters, declared as an incident declares its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from memfix.incidents.config import CheckpointConfig, OptimizerConfig, RunConfig, TrainingConfig
from memfix.incidents.distributed import World
from memfix.incidents.incident import Incident
from memfix.incidents.schema import setting
from memfix.incidents.tokens import IGNORED, TokenData, num_token_targets, token_batches

VOCABULARY = 40
ALONE = World(0, 1, torch.device("cpu"))


@dataclass(frozen=True)
class ToyConfig:
    width: int = setting(8, low=1, about="width of the hidden states")
    dropout: float = setting(0.0, low=0, below=1, about="dropout of the hidden states")
    broken_after: int | None = setting(None, low=0, about="forwards after which the loss is not a number")


class Toy(torch.nn.Module):
    """Notes the dtype of the weight each time its layer runs."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self.config, self.gradient_checkpointing = run.model, run.training.gradient_checkpointing
        config = run.model
        self.embedding = torch.nn.Embedding(VOCABULARY, config.width)
        self.layer = torch.nn.Linear(config.width, config.width)
        self.head = torch.nn.Linear(config.width, VOCABULARY)
        self.seen: list[torch.dtype] = []
        self.num_forwards = 0

    def run_layer(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.layer.weight.dtype)
        return x + F.dropout(torch.tanh(self.layer(x)), self.config.dropout)

    def forward(self, ids: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        x = checkpoint(self.run_layer, x, use_reentrant=False) if self.gradient_checkpointing else self.run_layer(x)
        logits = self.head(x).flatten(0, 1).float()
        self.num_forwards += 1
        if self.config.broken_after is not None and self.num_forwards > self.config.broken_after:
            logits = logits * torch.nan
        return F.cross_entropy(logits, target.flatten(), ignore_index=IGNORED, reduction="sum")


toy = Incident(
    package=__name__,
    model_schema=ToyConfig,
    data_schema=TokenData,
    build=Toy,
    data=lambda config: token_batches(config.data, VOCABULARY),
    loss=lambda model, batch: model(*batch),
    num_targets=num_token_targets,
    layers=lambda model: [model.layer],
    config="toy.yaml",
)


def run_config(**settings: Any) -> RunConfig:
    """Of the toy: each setting goes to the section that has a key of its name; ``data_seed`` is the data's."""
    settings = {"context_length": 12, "steps": 6, "states": 16, "prompt_fraction": 0.9, **settings}
    schemas = {
        "model": ToyConfig,
        "data": TokenData,
        "training": TrainingConfig,
        "optimizer": OptimizerConfig,
        "checkpoint": CheckpointConfig,
    }
    names = {"checkpoint_path": ("checkpoint", "path"), "data_seed": ("data", "seed")}
    given: dict[str, dict[str, Any]] = {section: {} for section in schemas}
    for name, value in settings.items():
        section, key = names.get(name) or (
            next(section for section, schema in schemas.items() if name in schema.__dataclass_fields__),
            name,
        )
        given[section][key] = value
    return RunConfig(**{section: schema(**given[section]) for section, schema in schemas.items()})
