"""A small language model around :class:`KDABlock`."""

# B batch, T tokens, D width

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from ..config import RunConfig
from ..decoder_parts import FeedForward, LanguageModel
from ..schema import setting
from .block import DEFAULT_CHUNK_SIZE, KDA_MODES, SCAN, SCAN_FORMS, KDABlock


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section."""

    layers: int = setting(low=1, about="number of layers, each a KDA block and a feed-forward")
    width: int = setting(low=1, about="width of the hidden states")
    heads: int = setting(low=1, about="heads per KDA block")
    head_width: int = setting(low=1, about="dk: width of keys and queries per head")
    value_width: int | None = setting(None, low=1, about="dv: width of values per head; null: the same as of keys")
    ffn_width: int = setting(low=1, about="inner width of the feed-forward")
    vocabulary: int = setting(low=2, about="number of different tokens")
    kda_memory_chunk_size: int = setting(
        DEFAULT_CHUNK_SIZE, low=1, about="tokens per chunk of the scan; a value outside 32 to 128 gives a warning"
    )
    kda_mode: str = setting(
        SCAN, choices=KDA_MODES, about="scan computes states chunk by chunk, sequential token by token"
    )
    kda_form: str = setting(
        "auto", choices=SCAN_FORMS, about="form of the scan; naive and reported are the report's own code"
    )


class Layer(nn.Module):
    """A KDA block, then a feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.kda = KDABlock(
            config.width,
            config.heads,
            config.head_width,
            config.value_width,
            memory_chunk_size=config.kda_memory_chunk_size,
            kda_mode=config.kda_mode,
            form=config.kda_form,
        )
        self.ffn_norm = nn.RMSNorm(config.width)
        self.ffn = FeedForward(config.width, config.ffn_width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.kda(x_BTD)
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class KDAModel(LanguageModel):
    loss_stage = "loss"
    norm_is_in_loss_stage = True

    def __init__(self, config: RunConfig) -> None:
        model: ModelConfig = config.model
        layers = (Layer(model) for _ in range(model.layers))
        super().__init__(
            model.vocabulary, model.width, layers, gradient_checkpointing=config.training.gradient_checkpointing
        )

    @property
    def blocks(self) -> list[KDABlock]:
        """The KDA block of each layer."""
        return [cast(Layer, layer).kda for layer in self.layers]
