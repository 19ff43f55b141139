"""Decoders of Llama's and of GPT-2's shape, some of whose layers are NPT layers."""

# B batch, T tokens, D width

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...ops.rope import rope
from ..decoder_parts import Attention, DecoderSize, FeedForward, LanguageModel, PreNormLayer, num_parameters
from .layer import NptLinear

# stages of the forward pass
BEFORE, CONVERTED, AFTER = "layers before", "converted layers", "layers after"


@dataclass(frozen=True)
class ModelSize(DecoderSize):
    """The shape of a decoder. Llama's kind has rotary positions, a gated feed-forward and an untied head, and no
    biases; GPT-2's kind has a learnt table of positions, GELU, a tied head and biases."""

    positions: int = 0
    """Rows of the learnt table of positions; 0 for rotary positions, which have no limit."""

    @property
    def is_llama(self) -> bool:
        return self.positions == 0

    @functools.cached_property
    def num_parameters(self) -> int:
        """The number of parameters of the unconverted decoder."""
        with torch.device("meta"):
            return num_parameters(Decoder(self))


# as published: Llama-3.1-8B, Llama-2-7B and GPT-2 small
SIZES = {
    "llama_8b": ModelSize(4096, 32, 32, 8, 14_336, 128_256),
    "llama_7b": ModelSize(4096, 32, 32, 32, 11_008, 32_000),
    "gpt2": ModelSize(768, 12, 12, 12, 3072, 50_257, 1024),
    "tiny_llama": ModelSize(32, 4, 4, 2, 80, 64),
    "tiny_gpt2": ModelSize(32, 4, 4, 4, 128, 64, 64),
}


class GeluFeedForward(nn.Module):
    """``down(gelu(up(x)))``, with biases."""

    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn_width)
        self.down = nn.Linear(ffn_width, width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x_BTD), approximate="tanh"))


class Decoder(LanguageModel):
    def __init__(self, size: ModelSize, *, gradient_checkpointing: bool = False) -> None:
        norm = nn.RMSNorm if size.is_llama else nn.LayerNorm

        def layer() -> nn.Module:
            attention = Attention(size, rotate=rope) if size.is_llama else Attention(size, biases=True)
            ffn = FeedForward if size.is_llama else GeluFeedForward
            return PreNormLayer(partial(norm, size.width), attention, ffn(size.width, size.ffn_width))

        super().__init__(
            size.vocabulary,
            size.width,
            (layer() for _ in range(size.layers)),
            norm=norm,
            positions=size.positions,
            is_tied=not size.is_llama,
            gradient_checkpointing=gradient_checkpointing,
        )

    def layer_stage(self, number: int) -> str:
        is_converted = [
            any(isinstance(part, NptLinear) for part in layer.ffn.children())  # type: ignore[union-attr]
            for layer in self.layers
        ]
        if is_converted[number]:
            return CONVERTED
        return AFTER if any(is_converted[:number]) else BEFORE
