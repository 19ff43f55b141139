"""The decoder of this incident, for the training loop."""

# B sequences, T tokens of one, D width

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import torch

from ...ops.linear_cross_entropy import FORMS
from ..config import TrainingConfig
from ..decoder_parts import next_token_loss_sum
from ..schema import setting
from ..trainable import Trainable
from .model import ATTENTION_TYPES, SIZES, build_model, get_size


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section."""

    size: str = setting(choices=SIZES, about="which decoder")
    attention_type: str = setting("nsa", choices=ATTENTION_TYPES, about="native sparse attention, or dense and causal")
    loss_form: str = setting("auto", choices=FORMS, about="of linear_cross_entropy; auto: a chunked one, at any length")
    rows_per_chunk: int | None = setting(None, low=1, about="tokens of a chunk of the loss; null: as the form has it")


class DecoderWithLoss(torch.nn.Module):
    """The decoder and the sum of its losses in one call."""

    def __init__(self, model: ModelConfig, training: TrainingConfig) -> None:
        super().__init__()
        self.form, self.rows_per_chunk = model.loss_form, model.rows_per_chunk
        self.decoder = build_model(
            model.size, attention_type=model.attention_type, gradient_checkpointing=training.gradient_checkpointing
        )

    def forward(self, ids_BT: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD = self.decoder.hidden_states(ids_BT)
        return next_token_loss_sum(
            hidden_BTD, self.decoder.head.weight, target_BT, form=self.form, rows_per_chunk=self.rows_per_chunk
        )


def _layers(model: torch.nn.Module) -> Iterable[torch.nn.Module]:
    return cast(DecoderWithLoss, model).decoder.layers


trainable = Trainable(
    model_schema=ModelConfig,
    vocabulary_size=lambda model: get_size(model.size).vocabulary,
    build=DecoderWithLoss,
    loss_sum=lambda model, ids_BT, target_BT: model(ids_BT, target_BT),
    layers=_layers,
)
