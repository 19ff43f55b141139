"""Decoders of Llama's and of GPT-2's shape, some of whose layers are NPT layers."""

# B batch, T tokens, D width, H query heads, G key-value heads, K head width

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ...ops.rope import rope
from ..decoder_parts import FeedForward, LanguageModel, PreNormLayer, num_parameters
from .layer import NptLinear

# stages of the forward pass
BEFORE, CONVERTED, AFTER = "layers before", "converted layers", "layers after"

LLAMA, GPT2 = "llama", "gpt2"


@dataclass(frozen=True)
class ModelSize:
    """The shape of a decoder. Llama's kind has rotary positions, a gated feed-forward and an untied head, and no
    biases; GPT-2's kind has a learnt table of positions, GELU, a tied head and biases."""

    kind: str
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocabulary: int
    positions: int
    """Rows of the learnt table of positions; 0 for rotary positions, which have no limit."""

    @property
    def is_llama(self) -> bool:
        return self.kind == LLAMA

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @functools.cached_property
    def num_parameters(self) -> int:
        """The number of parameters of the unconverted decoder."""
        with torch.device("meta"):
            return num_parameters(Decoder(self))


# as published: Llama-3.1-8B, Llama-2-7B and GPT-2 small
SIZES = {
    "llama_8b": ModelSize(LLAMA, 4096, 32, 32, 8, 14_336, 128_256, 0),
    "llama_7b": ModelSize(LLAMA, 4096, 32, 32, 32, 11_008, 32_000, 0),
    "gpt2": ModelSize(GPT2, 768, 12, 12, 12, 3072, 50_257, 1024),
    "tiny_llama": ModelSize(LLAMA, 32, 4, 4, 2, 80, 64, 0),
    "tiny_gpt2": ModelSize(GPT2, 32, 4, 4, 4, 128, 64, 64),
}


class Attention(nn.Module):
    """Causal attention, with as many key-value heads as query heads or fewer."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.size = size
        biases, kv_width = not size.is_llama, size.kv_heads * size.head_width
        self.query = nn.Linear(size.width, size.width, bias=biases)
        self.key = nn.Linear(size.width, kv_width, bias=biases)
        self.value = nn.Linear(size.width, kv_width, bias=biases)
        self.out = nn.Linear(size.width, size.width, bias=biases)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        by_head = (-1, self.size.head_width)
        q_BTHK, k_BTGK, v_BTGK = (part(x_BTD).unflatten(-1, by_head) for part in (self.query, self.key, self.value))
        if self.size.is_llama:
            q_BTHK, k_BTGK = rope(q_BTHK), rope(k_BTGK)
        q_BHTK, k_BGTK, v_BGTK = (part.transpose(1, 2) for part in (q_BTHK, k_BTGK, v_BTGK))
        # enable_gqa=True rules out kernels that keep no scores, even if no heads are grouped
        is_grouped = self.size.kv_heads != self.size.heads
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=is_grouped)
        return self.out(mixed_BHTK.transpose(1, 2).flatten(-2))


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
        feed_forward = FeedForward if size.is_llama else GeluFeedForward
        super().__init__(
            size.vocabulary,
            size.width,
            (
                PreNormLayer(partial(norm, size.width), Attention(size), feed_forward(size.width, size.ffn_width))
                for _ in range(size.layers)
            ),
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
