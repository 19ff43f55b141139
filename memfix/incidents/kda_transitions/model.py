"""A small language model around :class:`KDABlock`."""

# B batch, T tokens, D width

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from ...meters.stages import stage
from ..decoder_parts import FeedForward, init_weights, next_token_loss, run_layers
from .block import SCAN, KDABlock
from .chunk_size import DEFAULT_CHUNK_SIZE

# stages of the forward pass; each layer is one
EMBEDDING, LOSS = "embedding", "loss"


class Layer(nn.Module):
    """A KDA block, then a feed-forward."""

    def __init__(self, width: int, ffn_width: int, block: KDABlock, where: dict[str, Any]) -> None:
        super().__init__()
        self.kda = block
        self.ffn_norm = nn.RMSNorm(width, **where)
        self.ffn = FeedForward(width, ffn_width, where)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.kda(x_BTD)
        ffn_BTD: torch.Tensor = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + ffn_BTD


class LanguageModel(nn.Module):
    """``model(ids_BT, target_BT)`` is the sum of the losses of all targets that are not ignored."""

    def __init__(
        self,
        *,
        layers: int,
        width: int,
        heads: int,
        head_width: int,
        ffn_width: int,
        vocabulary: int,
        value_width: int | None = None,
        kda_memory_chunk_size: int = DEFAULT_CHUNK_SIZE,
        kda_mode: str = SCAN,
        kda_form: str = "auto",
        gradient_checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.gradient_checkpointing = gradient_checkpointing

        def block() -> KDABlock:
            return KDABlock(
                width,
                heads,
                head_width,
                value_width,
                memory_chunk_size=kda_memory_chunk_size,
                kda_mode=kda_mode,
                form=kda_form,
                **where,
            )

        self.embedding = nn.Embedding(vocabulary, width, **where)
        self.layers = nn.ModuleList(Layer(width, ffn_width, block(), where) for _ in range(layers))
        self.norm = nn.RMSNorm(width, **where)
        self.head = nn.Linear(width, vocabulary, bias=False, **where)
        init_weights(self, layers, ("kda.out.weight", "ffn.down.weight"))

    @property
    def blocks(self) -> list[KDABlock]:
        """The KDA block of each layer."""
        return [cast(Layer, layer).kda for layer in self.layers]

    def hidden_states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The input of the head, ``[B, T, D]``."""
        stage(EMBEDDING)
        x_BTD: torch.Tensor = self.embedding(ids_BT)
        x_BTD = run_layers(self.layers, x_BTD, gradient_checkpointing=self.gradient_checkpointing)
        stage(LOSS)
        hidden_BTD: torch.Tensor = self.norm(x_BTD)
        return hidden_BTD

    def forward(self, ids_BT: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        return next_token_loss(self.hidden_states(ids_BT), self.head.weight, target_BT)
