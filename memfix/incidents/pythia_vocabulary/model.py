"""A decoder of Pythia-70M's shape: six parallel layers of width 512, an untied head, and a vocabulary of any size.

The report counts a learnt table of 128 positions; the published model has rotary positions and 50,304 words. Both are
here, so that both counts can be checked.
"""

# B batch, T tokens, H heads, K head width, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ...ops.embedding import embedding
from ...ops.embedding.contract import contract as embedding_contract
from ...ops.one_hot_loss import one_hot_loss
from ...ops.one_hot_loss.contract import contract as one_hot_loss_contract
from ...ops.rope import RotaryEmbedding
from ..decoder_parts import LanguageModel
from ..schema import setting
from ..tokens import IGNORED
from .attention import dense_attention, window_attention

LEARNED, ROTARY = "learned", "rotary"
PUBLISHED_VOCABULARY = 50_304  # of the published Pythia-70M

GATHER, ONE_HOT = "gather", "one_hot"
EMBEDDING_FORMS = (GATHER, ONE_HOT)
STANDARD, INDEX, CHUNKED = "standard", "index", "chunked"
LOSS_FORMS = (STANDARD, ONE_HOT, INDEX, CHUNKED)


@dataclass(frozen=True)
class PythiaConfig:
    """The ``model`` section."""

    vocab_size: int = setting(10_000, low=1, about="number of words in the vocabulary, <unk> included")
    use_sparse_attention: bool = setting(
        False, about="each token attends to the last window tokens instead of to all tokens before it"
    )
    window: int = setting(32, low=1, about="number of tokens that sparse attention covers, the token itself included")
    layers: int = setting(6, low=1, about="number of layers, each with attention and a feed-forward side by side")
    width: int = setting(512, low=1, about="width of the hidden states")
    heads: int = setting(8, low=1, about="attention heads per layer")
    positions: str | None = setting(
        None,
        choices=(LEARNED, ROTARY),
        about="learned is a table, as the report counts; null: rotary for the published 50,304 words, else learned",
    )
    max_positions: int = setting(128, low=1, about="rows of the learnt table of positions")
    dropout: float = setting(0.0, low=0, below=1, about="dropout of attention weights and of what each layer adds")
    embedding_form: str = setting(
        GATHER,
        choices=EMBEDDING_FORMS,
        about="gather copies rows of the table; one_hot multiplies one-hot rows by the table",
    )
    loss_form: str = setting(
        STANDARD,
        choices=LOSS_FORMS,
        about="standard is torch's, one_hot uses one-hot targets, index is memfix's, chunked never holds all logits",
    )

    def __post_init__(self) -> None:
        for name in ("vocab_size", "window", "layers", "width", "heads", "max_positions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads, {self.heads}, got {self.width}")
        if self.has_rotary and self.head_width % 2:
            raise ValueError(f"rotary positions need heads of even width, got {self.head_width}")

    @property
    def has_rotary(self) -> bool:
        return (self.positions or (ROTARY if self.vocab_size == PUBLISHED_VOCABULARY else LEARNED)) == ROTARY

    @property
    def head_width(self) -> int:
        return self.width // self.heads

    @property
    def layer_params(self) -> int:
        """The parameters of one layer: ``12*D*D`` in matrices, ``13*D`` in their biases and two norms."""
        return 12 * self.width**2 + 13 * self.width

    def get_total_params(self) -> int:
        """The number of all parameters; equals the sum over the model's tensors."""
        positions = 0 if self.has_rotary else self.max_positions * self.width
        return 2 * self.vocab_size * self.width + positions + self.layers * self.layer_params + 2 * self.width


def create_pythia_70m(
    vocab_size: int = 10_000,
    use_sparse_attention: bool = False,
    device: torch.device | str | None = None,
    **settings: Any,
) -> tuple[Pythia, PythiaConfig]:
    """Build the model and its config, as in the report's check. ``settings`` are other fields of the config."""
    config = PythiaConfig(vocab_size=vocab_size, use_sparse_attention=use_sparse_attention, **settings)
    with torch.device(device or torch.get_default_device()):
        return Pythia(config), config


class Attention(nn.Module):
    def __init__(self, config: PythiaConfig, rotate: RotaryEmbedding | None) -> None:
        super().__init__()
        self.config, self.rotate = config, rotate
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BTHK, k_BTHK, v_BTHK = self.qkv(x_BTD).unflatten(-1, (3, self.config.heads, -1)).unbind(-3)
        if self.rotate is not None:
            q_BTHK, k_BTHK = self.rotate(q_BTHK), self.rotate(k_BTHK)
        q_BHTK, k_BHTK, v_BHTK = (x.transpose(1, 2) for x in (q_BTHK, k_BTHK, v_BTHK))
        dropout = self.config.dropout if self.training else 0.0
        if self.config.use_sparse_attention:
            out_BHTK = window_attention(q_BHTK, k_BHTK, v_BHTK, window=self.config.window, dropout=dropout)
        else:
            out_BHTK = dense_attention(q_BHTK, k_BHTK, v_BHTK, dropout=dropout)
        return self.out(out_BHTK.transpose(1, 2).flatten(-2))


class Layer(nn.Module):
    """Attention and feed-forward side by side, as GPT-NeoX has them: ``x + attention(norm(x)) + ffn(norm(x))``."""

    def __init__(self, config: PythiaConfig, rotate: RotaryEmbedding | None) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention = Attention(config, rotate)
        self.ffn_norm = nn.LayerNorm(config.width)
        self.ffn_up = nn.Linear(config.width, 4 * config.width)
        self.ffn_down = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        attended_BTD = self.dropout(self.attention(self.attention_norm(x_BTD)))
        ffn_BTD = self.dropout(self.ffn_down(F.gelu(self.ffn_up(self.ffn_norm(x_BTD)))))
        return x_BTD + attended_BTD + ffn_BTD


class Pythia(LanguageModel):
    too_long = "raise model.max_positions"

    def __init__(self, config: PythiaConfig, *, gradient_checkpointing: bool = False) -> None:
        self.config, self.draws = config, config.dropout > 0
        rotate = RotaryEmbedding(config.head_width, max_positions=config.max_positions) if config.has_rotary else None
        super().__init__(
            config.vocab_size,
            config.width,
            (Layer(config, rotate) for _ in range(config.layers)),
            norm=nn.LayerNorm,
            positions=0 if config.has_rotary else config.max_positions,
            gradient_checkpointing=gradient_checkpointing,
        )

    def embed(self, ids_BT: torch.Tensor) -> torch.Tensor:
        function = embedding if self.config.embedding_form == GATHER else one_hot_embedding
        return function(ids_BT, self.embedding.weight)

    def loss(self, hidden_BTD: torch.Tensor, target_BT: torch.Tensor) -> torch.Tensor:
        if self.config.loss_form == CHUNKED:
            return super().loss(hidden_BTD, target_BT)
        logits_NV = self.head(hidden_BTD).flatten(0, 1).float()
        return logits_loss(self.config.loss_form, logits_NV, target_BT.flatten())


def one_hot_embedding(ids_BT: torch.Tensor, weight_VD: torch.Tensor) -> torch.Tensor:
    """The embedding of ids by a product with one-hot rows, as a small framework computes it."""
    x_ND: torch.Tensor = embedding_contract.naive(ids_BT.flatten(), weight_VD)
    return x_ND.unflatten(0, ids_BT.shape)


def logits_loss(form: str, logits_NV: torch.Tensor, target_N: torch.Tensor) -> torch.Tensor:
    """The sum of the losses of all targets that are not ignored, computed from logits by ``form``."""
    by_form: dict[str, Callable[..., torch.Tensor]] = {
        STANDARD: F.cross_entropy,
        ONE_HOT: one_hot_loss_contract.naive,
        INDEX: one_hot_loss,
    }
    return by_form[form](logits_NV, target_N, ignore_index=IGNORED, reduction="sum")
