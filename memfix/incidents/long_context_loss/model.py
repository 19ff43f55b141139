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
from typing import Any, Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import nn

from ...errors import UsageError, did_you_mean
from ...meters.stages import stage
from ...ops.linear_cross_entropy import FORMS
from ...ops.linear_cross_entropy.reported import reported_linear_cross_entropy
from ...ops.nsa import nsa
from ...ops.rope import rope
from ..decoder_parts import FeedForward, PreNormLayer, init_weights, next_token_loss, run_layer

AttentionType = Literal["nsa", "dense"]
ATTENTION_TYPES: tuple[AttentionType, ...] = get_args(AttentionType)

REPORTED_LOSS = "reported"
LOSS_FORMS = (*FORMS, REPORTED_LOSS)

Rotate = Callable[[torch.Tensor], torch.Tensor]
SparseAttend = Callable[..., torch.Tensor]
"""A function with the arguments of :func:`memfix.ops.nsa.nsa`."""

# stages of the forward pass, which are the rows of the report's table
EMBEDDING, FIRST_LAYER, OTHER_LAYERS, LOSS = "embedding", "first layer", "other layers", "loss"


@dataclass(frozen=True)
class SparseAttention:
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


@dataclass(frozen=True)
class ModelSize:
    width: int
    layers: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    vocabulary: int
    context_length: int
    """Tokens that the model is meant for; it accepts any number."""
    sparse: SparseAttention


SIZES = {
    "4B": ModelSize(2560, 36, 32, 8, 80, 9216, 151_936, 131_072, SparseAttention()),
    "tiny": ModelSize(64, 2, 4, 2, 16, 176, 512, 512, SparseAttention(8, 4, 16, 2, 32, 512)),
}


@dataclass(frozen=True)
class AttentionKind:
    """Dense or sparse attention, and the functions that compute it, which a profile replaces with stand-ins."""

    name: AttentionType = "nsa"
    rotate: Rotate = rope
    sparse_attend: SparseAttend = nsa


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: causal and dense, or sparse in three gated branches."""

    def __init__(self, size: ModelSize, kind: AttentionKind, where: dict[str, Any]) -> None:
        super().__init__()
        self.size, self.kind = size, kind
        kv_width = size.kv_heads * size.head_width
        self.query = nn.Linear(size.width, size.heads * size.head_width, bias=False, **where)
        self.key = nn.Linear(size.width, kv_width, bias=False, **where)
        self.value = nn.Linear(size.width, kv_width, bias=False, **where)
        self.out = nn.Linear(size.heads * size.head_width, size.width, bias=False, **where)
        if kind.name == "nsa":
            self.gate_compressed = nn.Linear(size.width, size.heads, bias=False, **where)
            self.gate_selected = nn.Linear(size.width, size.heads, bias=False, **where)
            self.position_embedding = nn.Parameter(torch.empty(size.sparse.compress_block, size.head_width, **where))

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        q_BTHK = self.kind.rotate(self.query(x_BTD).unflatten(-1, (self.size.heads, self.size.head_width)))
        k_BTGK = self.kind.rotate(self.key(x_BTD).unflatten(-1, (self.size.kv_heads, self.size.head_width)))
        v_BTGK = self.value(x_BTD).unflatten(-1, (self.size.kv_heads, self.size.head_width))
        attend = self._sparse if self.kind.name == "nsa" else self._dense
        mixed_BTHK: torch.Tensor = attend(x_BTD, q_BTHK, k_BTGK, v_BTGK)
        out_BTD: torch.Tensor = self.out(mixed_BTHK.flatten(-2))
        return out_BTD

    def _dense(
        self, x_BTD: torch.Tensor, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor
    ) -> torch.Tensor:
        q_BHTK, k_BGTK, v_BGTK = (part.transpose(1, 2) for part in (q_BTHK, k_BTGK, v_BTGK))
        return F.scaled_dot_product_attention(q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=True).transpose(1, 2)

    def _sparse(
        self, x_BTD: torch.Tensor, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor
    ) -> torch.Tensor:
        compressed_BTH = self.gate_compressed(x_BTD).sigmoid()
        selected_BTH = self.gate_selected(x_BTD).sigmoid()
        gates_BTH3 = torch.stack((compressed_BTH, selected_BTH, torch.ones_like(compressed_BTH)), dim=-1)
        # under autocast keys have a narrower dtype than parameters
        places_LK = self.position_embedding.to(k_BTGK.dtype)
        return self.kind.sparse_attend(
            q_BTHK, k_BTGK, v_BTGK, gates_BTH3, position_embedding=places_LK, **vars(self.size.sparse)
        )


class Decoder(nn.Module):
    """``decoder(ids_BT)`` gives logits, ``decoder(ids_BT, labels_BT)`` the loss of predicting each next label.

    ``loss_form`` and ``rows_per_chunk`` go to :func:`memfix.ops.linear_cross_entropy.linear_cross_entropy`; the form
    ``reported`` is the report's own fix, to be measured. ``gradient_checkpointing`` keeps only the input of every
    layer for backward, which recomputes the rest.
    """

    def __init__(
        self,
        size: ModelSize,
        *,
        attention: AttentionKind,
        gradient_checkpointing: bool = False,
        loss_form: str = "auto",
        rows_per_chunk: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.size = size
        self.gradient_checkpointing = gradient_checkpointing
        self.loss_form, self.rows_per_chunk = loss_form, rows_per_chunk
        self.embedding = nn.Embedding(size.vocabulary, size.width, **where)
        norm = partial(nn.RMSNorm, size.width, **where)
        self.layers = nn.ModuleList(
            PreNormLayer(norm, Attention(size, attention, where), FeedForward(size.width, size.ffn_width, where))
            for _ in range(size.layers)
        )
        self.norm = norm()
        self.head = nn.Linear(size.width, size.vocabulary, bias=False, **where)
        init_weights(self, size.layers, ("attention.out.weight", "ffn.down.weight"))

    def hidden_states(self, ids_BT: torch.Tensor) -> torch.Tensor:
        """The input of the head, ``[B, T, D]``."""
        stage(EMBEDDING)
        x_BTD: torch.Tensor = self.embedding(ids_BT)
        for number, layer in enumerate(self.layers):
            stage(FIRST_LAYER if number == 0 else OTHER_LAYERS)
            x_BTD = run_layer(layer, x_BTD, gradient_checkpointing=self.gradient_checkpointing)
        hidden_BTD: torch.Tensor = self.norm(x_BTD)
        return hidden_BTD

    def forward(
        self,
        ids_BT: torch.Tensor,
        labels_BT: torch.Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
    ) -> torch.Tensor:
        """``labels_BT`` may have one label more than there are ids, which the last position then predicts."""
        hidden_BTD = self.hidden_states(ids_BT)
        stage(LOSS)
        if labels_BT is None:
            logits_BTV: torch.Tensor = self.head(hidden_BTD)
            return logits_BTV
        target_BT = next_labels(labels_BT, ids_BT.shape[1], ignore_index)
        options: dict[str, Any] = {"ignore_index": ignore_index, "reduction": reduction}
        if self.loss_form == REPORTED_LOSS:
            flat = (hidden_BTD.flatten(0, 1), self.head.weight, target_BT.flatten())
            loss = reported_linear_cross_entropy(*flat, **options, rows_per_chunk=self.rows_per_chunk or 4096)
            return loss.unflatten(0, target_BT.shape) if reduction == "none" else loss
        options |= {"form": self.loss_form, "rows_per_chunk": self.rows_per_chunk}
        return next_token_loss(hidden_BTD, self.head.weight, target_BT, **options)


def next_labels(labels_BT: torch.Tensor, num_positions: int | None = None, ignore_index: int = -100) -> torch.Tensor:
    """The target of each position: the next label, or ``ignore_index`` if there is none.

    The result has ``num_positions`` targets per sequence; without it, as many as there are labels.

    The labels are shifted once, before anything is cut into chunks: a shift inside each chunk would lose the
    prediction at every border, and a shift of the hidden states would copy them.
    """
    target_BT = labels_BT.new_full((len(labels_BT), num_positions or labels_BT.shape[1]), ignore_index)
    following_BT = labels_BT[:, 1:]
    target_BT[:, : following_BT.shape[1]] = following_BT
    return target_BT


def build_model(
    size: str = "tiny",
    *,
    attention_type: str = "nsa",
    rotate: Rotate = rope,
    **options: Any,
) -> Decoder:
    """The decoder of the size called ``size``: ``"4B"`` or ``"tiny"``. ``options`` are those of :class:`Decoder`."""
    for what, name, known in (("model size", size, SIZES), ("attention type", attention_type, ATTENTION_TYPES)):
        if name not in known:
            raise UsageError(f"unknown {what} {name!r}{did_you_mean(name, known)}")
    return Decoder(SIZES[size], attention=AttentionKind(cast(AttentionType, attention_type), rotate), **options)


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
