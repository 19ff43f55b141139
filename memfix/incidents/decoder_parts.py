"""The language model that several incidents share, with its attention, feed-forward, initialisation and loss."""

# B batch, T tokens, D width, H query heads, G key-value heads, K head width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError
from ..meters.stages import stage
from ..ops.linear_cross_entropy import linear_cross_entropy
from .tokens import IGNORED

# ends of the names of weights whose products are added to the hidden states
RESIDUAL_WRITERS = ("out.weight", "down.weight")

EMBEDDING = "embedding"  # the first stage of every language model

Rotate = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class DecoderSize:
    width: int
    layers: int
    heads: int
    kv_heads: int
    ffn_width: int
    vocabulary: int

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Causal attention, with as many key-value heads as query heads or fewer. ``rotate`` gives positions to heads."""

    def __init__(self, size: DecoderSize, *, rotate: Rotate = lambda x: x, biases: bool = False) -> None:
        super().__init__()
        self.size, self.rotate = size, rotate
        kv_width = size.kv_heads * size.head_width
        self.query = nn.Linear(size.width, size.width, bias=biases)
        self.key = nn.Linear(size.width, kv_width, bias=biases)
        self.value = nn.Linear(size.width, kv_width, bias=biases)
        self.out = nn.Linear(size.width, size.width, bias=biases)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        by_head = (-1, self.size.head_width)
        q_BTHK = self.rotate(self.query(x_BTD).unflatten(-1, by_head))
        k_BTGK = self.rotate(self.key(x_BTD).unflatten(-1, by_head))
        v_BTGK = self.value(x_BTD).unflatten(-1, by_head)
        return self.out(self.attend(x_BTD, q_BTHK, k_BTGK, v_BTGK).flatten(-2))

    def attend(
        self, x_BTD: torch.Tensor, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor
    ) -> torch.Tensor:
        q_BHTK, k_BGTK, v_BGTK = (part.transpose(1, 2) for part in (q_BTHK, k_BTGK, v_BTGK))
        # enable_gqa=True rules out kernels that keep no scores, even if no heads are grouped
        is_grouped = self.size.kv_heads != self.size.heads
        out_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=is_grouped)
        return out_BHTK.transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, ffn_width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn_width, bias=False)
        self.up = nn.Linear(width, ffn_width, bias=False)
        self.down = nn.Linear(ffn_width, width, bias=False)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))


class PreNormLayer(nn.Module):
    """A pre-norm decoder layer: ``x + attention(norm(x))``, then ``x + ffn(norm(x))``."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.ffn_norm, self.ffn = norm(), ffn

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        return x_BTD + self.ffn(self.ffn_norm(x_BTD))


class LanguageModel(nn.Module):
    """``model(ids_BT, target_BT)`` is the sum of the losses of all targets that are not ignored.

    ``positions`` is the number of rows of a learnt table of positions. With ``is_tied`` the head is the embedding.
    """

    loss_stage = "head and loss"
    norm_is_in_loss_stage = False
    draws = False
    """Whether layers draw random numbers, as for dropout."""
    too_long = "lower data.context_length"
    """What to do about a sequence that is longer than the table of positions."""

    def __init__(
        self,
        vocabulary: int,
        width: int,
        layers: Iterable[nn.Module],
        *,
        norm: Callable[[int], nn.Module] = nn.RMSNorm,
        positions: int = 0,
        is_tied: bool = False,
        gradient_checkpointing: bool = False,
    ) -> None:
        super().__init__()
        self.gradient_checkpointing = gradient_checkpointing
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(positions, width) if positions else None
        self.layers = nn.ModuleList(layers)
        self.norm = norm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight
        init_weights(self, len(self.layers))

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        return self.embedding(ids_BT)

    def layer_stage(self, number: int) -> str:
        """The stage of layer ``number``, counted from 0."""
        return layer_stage(number)

    def hidden_states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The input of the head, ``[B, T, D]``."""
        stage(EMBEDDING)
        x_BTD = self.embed(ids_BT)
        if self.positions is not None:
            x_BTD = x_BTD + self._first_positions(self.positions, ids_BT.shape[-1])
        for number, layer in enumerate(self.layers):
            stage(self.layer_stage(number))
            x_BTD = run_layer(layer, x_BTD, gradient_checkpointing=self.gradient_checkpointing, draws=self.draws)
        if self.norm_is_in_loss_stage:
            stage(self.loss_stage)
        return self.norm(x_BTD)

    def _first_positions(self, table: nn.Embedding, num_tokens: int) -> torch.Tensor:
        if num_tokens > table.num_embeddings:
            raise UsageError(
                f"a sequence must have at most {table.num_embeddings} tokens, the rows of the table of positions, "
                f"got {num_tokens}: {self.too_long}"
            )
        return table.weight[:num_tokens]

    def loss(self, hidden_BTD: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        return next_token_loss(hidden_BTD, self.head.weight, target_BT)

    def forward(self, ids_BT: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD = self.hidden_states(ids_BT)
        if not self.norm_is_in_loss_stage:
            stage(self.loss_stage)
        return self.loss(hidden_BTD, target_BT)


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def init_weights(model: nn.Module, num_layers: int) -> None:
    """Set norms to 1 and biases to 0, and draw matrices with a standard deviation of 0.02.

    ``RESIDUAL_WRITERS`` are smaller by ``sqrt(2 * num_layers)``, as in GPT-2.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        elif parameter.dim() > 1:
            parameter.normal_(std=0.02 / (2 * num_layers) ** 0.5 if name.endswith(RESIDUAL_WRITERS) else 0.02)


def layer_stage(number: int) -> str:
    """The stage of layer ``number``, counted from 0: ``layer 1`` is the first."""
    return f"layer {number + 1}"


def run_layer(
    layer: Callable[..., torch.Tensor],
    *inputs: torch.Tensor | None,
    gradient_checkpointing: bool = True,
    draws: bool = False,
) -> torch.Tensor:
    """``layer(*inputs)``. With checkpointing, only the inputs are kept and the rest is recomputed in backward.

    ``draws`` says that the layer draws random numbers, as for dropout: the recomputation then draws the same ones.
    """
    if not (gradient_checkpointing and torch.is_grad_enabled()):
        return layer(*inputs)
    return checkpoint(layer, *inputs, use_reentrant=False, preserve_rng_state=draws)


def next_token_loss(
    hidden_BTD: torch.Tensor, head_VD: torch.Tensor, target_BT: torch.Tensor, **options: Any
) -> torch.Tensor:
    """The sum of the losses of all targets that are not ignored, in float32 or wider, chunked at any length.

    ``options`` override the options of ``linear_cross_entropy`` that are set here.
    """
    # a 16-bit loss has only two or three digits; autocast gives the same products with a float32 loss
    narrow = hidden_BTD.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden_BTD.device.type, hidden_BTD.dtype if narrow else None, enabled=narrow):
        options = {"ignore_index": IGNORED, "reduction": "sum", **options}
        return linear_cross_entropy(hidden_BTD, head_VD, target_BT, **options)
