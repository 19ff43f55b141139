"""The decoder of the report, rebuilt from its figures, and a tiny one of the same kind.

The report gives neither the width nor the number of layers. They follow from what it does give (3.92B parameters, 640
MiB of hidden states at 131,072 tokens, a vocabulary of 151,936) and from the public configuration that it extends:
width 2560, 36 layers, 32 query and 8 key-value heads of 80, a gated feed-forward of 9216, an untied head, no biases.
With dense attention that makes 3,915,962,880 parameters, with sparse attention 3,921,918,720.
"""

# B batch, T tokens, D width, H query heads, G key-value heads, K head width, V vocabulary

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ...ops.linear_cross_entropy import FORMS
from ...ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ...ops.nsa import nsa
from ...ops.rope import RotaryEmbedding
from ..config import RunConfig
from ..decoder_parts import (
    Attention,
    DecoderSize,
    FeedForward,
    LanguageModel,
    PreNormLayer,
    Rotate,
    next_token_loss,
)
from ..schema import setting
from ..tokens import IGNORED

ATTENTION_TYPES = NSA, DENSE = ("nsa", "dense")

REPORTED_LOSS = "reported"
LOSS_FORMS = (*FORMS, REPORTED_LOSS)

# stages of the layers, which are rows of the report's table
FIRST_LAYER, OTHER_LAYERS = "first layer", "other layers"


@dataclass(frozen=True)
class SparseBlocks:
    """Block sizes of native sparse attention.

    The report says only ``nsa``. Its count of parameters has 165,440 per layer more than dense attention, which is
    ``20*80 + 2*2560*32``. We read them as one vector of head width for each place in a compressed block, hence blocks
    of 20, and as two gates for each query head, for the compressed and the selected branch. The sliding window has no
    gate: it counts in full. The other sizes are the NSA paper's, at the nearest multiple of the stride.

    ``queries_per_chunk`` is small enough that a chunk's tensors take less than the feed-forward that follows. Both grow
    with the context, so this holds at every length.
    """

    compress_block: int = 20
    compress_stride: int = 10
    select_block: int = 60
    num_selected: int = 16
    window: int = 512
    queries_per_chunk: int | None = 1024

    def attend(self, *tensors: torch.Tensor) -> torch.Tensor:
        """The op, for queries, keys, values, gates and a position embedding."""
        *q_k_v_gates, places_LK = tensors
        return nsa(*q_k_v_gates, position_embedding=places_LK, **vars(self))


@dataclass(frozen=True)
class ModelSize(DecoderSize):
    context_length: int
    """Tokens that the model is meant for; it accepts any number."""
    sparse: SparseBlocks


SIZES = {
    "4B": ModelSize(2560, 36, 32, 8, 9216, 151_936, 131_072, SparseBlocks()),
    "tiny": ModelSize(64, 2, 4, 2, 176, 512, 512, SparseBlocks(8, 4, 16, 2, 32, 512)),
}


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section."""

    size: str = setting(choices=SIZES, about="the decoder, by its size")
    attention_type: str = setting(
        "nsa",
        choices=ATTENTION_TYPES,
        about="nsa is native sparse attention; dense is causal attention to all tokens before",
    )
    loss_form: str = setting(
        "auto",
        choices=LOSS_FORMS,
        about="form of linear_cross_entropy; auto chooses a chunked form at any length; reported is the report's fix",
    )
    rows_per_chunk: int | None = setting(
        None, low=1, about="tokens per chunk of the loss; null: the form's own default"
    )

    @property
    def shape(self) -> ModelSize:
        return SIZES[self.size]


class SparseAttention(Attention):
    """Sparse attention in three gated branches. A profile replaces ``rotate`` and ``function`` with stand-ins."""

    def __init__(self, size: ModelSize, rotate: Rotate) -> None:
        super().__init__(size, rotate=rotate)
        self.function: Callable[..., torch.Tensor] = size.sparse.attend
        self.gate_compressed = nn.Linear(size.width, size.heads, bias=False)
        self.gate_selected = nn.Linear(size.width, size.heads, bias=False)
        self.position_embedding = nn.Parameter(torch.empty(size.sparse.compress_block, size.head_width))

    def attend(
        self, x_BTD: torch.Tensor, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor
    ) -> torch.Tensor:
        compressed_BTH = self.gate_compressed(x_BTD).sigmoid()
        selected_BTH = self.gate_selected(x_BTD).sigmoid()
        gates_BTH3 = torch.stack((compressed_BTH, selected_BTH, torch.ones_like(compressed_BTH)), dim=-1)
        # under autocast keys have a narrower dtype than parameters
        return self.function(q_BTHK, k_BTGK, v_BTGK, gates_BTH3, self.position_embedding.to(k_BTGK.dtype))


class Decoder(LanguageModel):
    """``model(ids_BT, labels_BT)`` is the sum of the losses of predicting each next label.

    ``labels_BT`` may have one label more than there are ids, which the last position then predicts.
    """

    loss_stage = "loss"

    def __init__(self, config: RunConfig) -> None:
        self.config: ModelConfig = config.model
        size = self.config.shape
        # the method, because torch refuses a function in place of a module, and a profile puts one there
        rotate = RotaryEmbedding(size.head_width, max_positions=config.data.context_length).forward

        def layer() -> nn.Module:
            is_sparse = self.config.attention_type == NSA
            attention = SparseAttention(size, rotate) if is_sparse else Attention(size, rotate=rotate)
            return PreNormLayer(partial(nn.RMSNorm, size.width), attention, FeedForward(size.width, size.ffn_width))

        super().__init__(
            size.vocabulary,
            size.width,
            (layer() for _ in range(size.layers)),
            gradient_checkpointing=config.training.gradient_checkpointing,
        )

    def layer_stage(self, number: int) -> str:
        return OTHER_LAYERS if number else FIRST_LAYER

    def loss(self, hidden_BTD: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        target_BT, rows_per_chunk = next_labels(labels_BT, hidden_BTD.shape[1]), self.config.rows_per_chunk
        if self.config.loss_form != REPORTED_LOSS:
            options = {"form": self.config.loss_form, "rows_per_chunk": rows_per_chunk}
            return next_token_loss(hidden_BTD, self.head.weight, target_BT, **options)
        flat = (hidden_BTD.flatten(0, 1), self.head.weight, target_BT.flatten())
        options = {"ignore_index": IGNORED, "reduction": "sum", "rows_per_chunk": rows_per_chunk or 4096}
        return reported_linear_cross_entropy(*flat, **options)


def next_labels(labels_BT: torch.Tensor, num_positions: int | None = None) -> torch.Tensor:
    """The target of each position: the next label, or ``IGNORED`` if there is none.

    The result has ``num_positions`` targets per sequence; without it, as many as there are labels.

    The labels are shifted once, before anything is cut into chunks: a shift inside each chunk would lose the
    prediction at every border, and a shift of the hidden states would copy them.
    """
    target_BT = labels_BT.new_full((len(labels_BT), num_positions or labels_BT.shape[1]), IGNORED)
    following_BT = labels_BT[:, 1:]
    target_BT[:, : following_BT.shape[1]] = following_BT
    return target_BT


def private_tables(
    size: ModelSize, positions: int, *, device: torch.device | str, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The report's rotary positions: for each layer a table of cosines and one of sines, ``[positions, K]`` each.

    The report counts the tables, which have the model's dtype, as parameters.
    """

    def table() -> tuple[torch.Tensor, torch.Tensor]:
        exponents = torch.arange(0, size.head_width, 2, device=device, dtype=torch.float32) / size.head_width
        positions_T = torch.arange(positions, device=device, dtype=torch.float32)
        angles_TK = torch.outer(positions_T, 10_000.0**-exponents).repeat(1, 2)
        return angles_TK.cos().to(dtype), angles_TK.sin().to(dtype)

    return [table() for _ in range(size.layers)]
