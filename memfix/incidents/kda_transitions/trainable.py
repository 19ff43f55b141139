"""The language model of this incident, for the training loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from ..config import TrainingConfig
from ..schema import setting
from ..trainable import Trainable
from .block import KDA_MODES, SCAN, SCAN_FORMS
from .chunk_size import DEFAULT_CHUNK_SIZE
from .model import LanguageModel


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section: the arguments of :class:`LanguageModel`, by name."""

    layers: int = setting(low=1, about="layers, each a KDA block and a feed-forward")
    width: int = setting(low=1, about="of the hidden states")
    heads: int = setting(low=1, about="heads of a KDA block")
    head_width: int = setting(low=1, about="dk: keys and queries of a head")
    value_width: int | None = setting(None, low=1, about="dv: values of a head; null: as wide as keys")
    ffn_width: int = setting(low=1, about="of the feed-forward")
    vocabulary: int = setting(low=2, about="tokens that there are")
    kda_memory_chunk_size: int = setting(
        DEFAULT_CHUNK_SIZE, low=1, about="tokens of a chunk of the scan; 32 to 128, others warn"
    )
    kda_mode: str = setting(SCAN, choices=KDA_MODES, about="states by chunks, or token by token")
    kda_form: str = setting("auto", choices=SCAN_FORMS, about="of the scan; naive and reported are the report's own")


def build_model(config: ModelConfig, *, gradient_checkpointing: bool = False, **where: Any) -> LanguageModel:
    """The model that ``config`` describes. ``where`` is a device and a dtype."""
    return LanguageModel(**dataclasses.asdict(config), gradient_checkpointing=gradient_checkpointing, **where)


def _build(config: ModelConfig, training: TrainingConfig) -> torch.nn.Module:
    return build_model(config, gradient_checkpointing=training.gradient_checkpointing)


def _layers(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return cast(LanguageModel, model).layers


trainable = Trainable(
    model_schema=ModelConfig,
    vocabulary_size=lambda model: model.vocabulary,
    build=_build,
    loss_sum=lambda model, ids_BT, target_BT: model(ids_BT, target_BT),
    layers=_layers,
)
