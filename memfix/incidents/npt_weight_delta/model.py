"""Decoders of Llama's and of GPT-2's shape, some of whose layers are NPT layers."""

# B batch, T tokens, D width, H query heads, G key-value heads, K head width

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...meters.stages import stage
from ...ops.rope import rope
from ..decoder_parts import FeedForward, PreNormLayer, first_positions, init_weights, next_token_loss, run_layer
from .layer import NptLinear

# stages of the forward pass
EMBEDDING, BEFORE, CONVERTED, AFTER, LOSS = (
    "embedding", "layers before", "converted layers", "layers after", "head and loss",
)  # fmt: skip

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

    @property
    def num_parameters(self) -> int:
        """Parameters of the unconverted decoder, by arithmetic; equals the sum over its tensors."""
        attention = 2 * self.width * self.width + 2 * self.width * self.kv_heads * self.head_width
        projections = (3 if self.is_llama else 2) * self.width * self.ffn_width
        # norms, and the biases of GPT-2's kind
        vectors = 2 * self.width if self.is_llama else 4 * self.width + 5 * self.width + self.ffn_width
        tables = (2 if self.is_llama else 1) * self.vocabulary * self.width + self.positions * self.width
        last_norm = self.width if self.is_llama else 2 * self.width
        return tables + self.layers * (attention + projections + vectors) + last_norm


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

    def __init__(self, size: ModelSize, where: dict[str, Any]) -> None:
        super().__init__()
        self.size = size
        biases, kv_width = not size.is_llama, size.kv_heads * size.head_width
        self.query = nn.Linear(size.width, size.width, bias=biases, **where)
        self.key = nn.Linear(size.width, kv_width, bias=biases, **where)
        self.value = nn.Linear(size.width, kv_width, bias=biases, **where)
        self.out = nn.Linear(size.width, size.width, bias=biases, **where)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        by_head = (-1, self.size.head_width)
        q_BTHK, k_BTGK, v_BTGK = (part(x_BTD).unflatten(-1, by_head) for part in (self.query, self.key, self.value))
        if self.size.is_llama:
            q_BTHK, k_BTGK = rope(q_BTHK), rope(k_BTGK)
        q_BHTK, k_BGTK, v_BGTK = (part.transpose(1, 2) for part in (q_BTHK, k_BTGK, v_BTGK))
        # enable_gqa=True rules out kernels that keep no scores, even if no heads are grouped
        is_grouped = self.size.kv_heads != self.size.heads
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=is_grouped)
        out_BTD: torch.Tensor = self.out(mixed_BHTK.transpose(1, 2).flatten(-2))
        return out_BTD


class GeluFeedForward(nn.Module):
    """``down(gelu(up(x)))``, with biases."""

    def __init__(self, width: int, ffn_width: int, where: dict[str, Any]) -> None:
        super().__init__()
        self.up = nn.Linear(width, ffn_width, **where)
        self.down = nn.Linear(ffn_width, width, **where)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = self.down(F.gelu(self.up(x_BTD), approximate="tanh"))
        return out_BTD


class Decoder(nn.Module):
    """``model(ids_BT, target_BT)`` is the sum of the losses of all targets that are not ignored."""

    def __init__(
        self, size: ModelSize, *, gradient_checkpointing: bool = False, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device}
        self.size, self.gradient_checkpointing = size, gradient_checkpointing
        self.embedding = nn.Embedding(size.vocabulary, size.width, **where)
        self.positions = None if size.is_llama else nn.Embedding(size.positions, size.width, **where)
        norm = partial(nn.RMSNorm if size.is_llama else nn.LayerNorm, size.width, **where)
        feed_forward = partial(FeedForward if size.is_llama else GeluFeedForward, size.width, size.ffn_width, where)
        self.layers = nn.ModuleList(
            PreNormLayer(norm, Attention(size, where), feed_forward()) for _ in range(size.layers)
        )
        self.norm = norm()
        self.head = nn.Linear(size.width, size.vocabulary, bias=False, **where)
        if not size.is_llama:
            self.head.weight = self.embedding.weight
        init_weights(self, size.layers, ("attention.out.weight", "ffn.down.weight"))

    def hidden_states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The input of the head, ``[B, T, D]``."""
        stage(EMBEDDING)
        x_BTD: torch.Tensor = self.embedding(ids_BT)
        if self.positions is not None:
            x_BTD = x_BTD + first_positions(self.positions, ids_BT.shape[-1], "lower data.context_length")
        name = BEFORE
        for layer in self.layers:
            is_converted = any(isinstance(part, NptLinear) for part in layer.ffn.children())  # type: ignore[union-attr]
            name = CONVERTED if is_converted else BEFORE if name == BEFORE else AFTER
            stage(name)
            x_BTD = run_layer(layer, x_BTD, gradient_checkpointing=self.gradient_checkpointing)
        hidden_BTD: torch.Tensor = self.norm(x_BTD)
        return hidden_BTD

    def forward(self, ids_BT: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD = self.hidden_states(ids_BT)
        stage(LOSS)
        return next_token_loss(hidden_BTD, self.head.weight, target_BT)
