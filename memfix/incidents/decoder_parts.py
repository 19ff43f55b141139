"""Parts that the decoders of several incidents share: feed-forward, checkpointing, initialisation and loss."""

# B batch, T tokens, D width, V vocabulary

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ..errors import UsageError
from ..meters.stages import stage
from ..ops.linear_cross_entropy import linear_cross_entropy
from .tokens import IGNORED


class FeedForward(nn.Module):
    """SwiGLU: ``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int, ffn_width: int, where: dict[str, Any]) -> None:
        super().__init__()
        self.gate = nn.Linear(width, ffn_width, bias=False, **where)
        self.up = nn.Linear(width, ffn_width, bias=False, **where)
        self.down = nn.Linear(ffn_width, width, bias=False, **where)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        out_BTD: torch.Tensor = self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD))
        return out_BTD


class PreNormLayer(nn.Module):
    """A pre-norm decoder layer: ``x + attention(norm(x))``, then ``x + ffn(norm(x))``."""

    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(), attention
        self.ffn_norm, self.ffn = norm(), ffn

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD))
        ffn_BTD: torch.Tensor = self.ffn(self.ffn_norm(x_BTD))
        return x_BTD + ffn_BTD


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@torch.no_grad()
def init_weights(model: nn.Module, num_layers: int, residual_writers: tuple[str, ...]) -> None:
    """Set norms to 1 and biases to 0, and draw matrices with a standard deviation of 0.02.

    Weights whose names end in one of ``residual_writers`` are smaller by ``sqrt(2 * num_layers)``, as in GPT-2.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        elif parameter.dim() > 1:
            writes_residual = name.endswith(residual_writers)
            parameter.normal_(std=0.02 / (2 * num_layers) ** 0.5 if writes_residual else 0.02)


def first_positions(table: nn.Embedding, num_tokens: int, remedy: str) -> torch.Tensor:
    """The rows of a learnt table of positions for ``num_tokens`` tokens. Refuses more tokens than it has rows."""
    if num_tokens > table.num_embeddings:
        raise UsageError(
            f"a sequence must have at most {table.num_embeddings} tokens, the rows of the table of positions, "
            f"got {num_tokens}: {remedy}"
        )
    return table.weight[:num_tokens]


def layer_stage(number: int) -> str:
    """The stage of layer ``number``, counted from 0: ``layer 1`` is the first."""
    return f"layer {number + 1}"


def run_layers(
    layers: Iterable[nn.Module], x_BTD: torch.Tensor, *, gradient_checkpointing: bool, draws: bool = False
) -> torch.Tensor:
    """Run all layers one after the other, each in a stage of its own."""
    for number, layer in enumerate(layers):
        stage(layer_stage(number))
        x_BTD = run_layer(layer, x_BTD, gradient_checkpointing=gradient_checkpointing, draws=draws)
    return x_BTD


def run_layer(
    layer: nn.Module, x_BTD: torch.Tensor, *, gradient_checkpointing: bool, draws: bool = False
) -> torch.Tensor:
    """``layer(x_BTD)``. With checkpointing, only its input is kept and the rest is recomputed in backward.

    ``draws`` says that the layer draws random numbers, as for dropout: the recomputation then draws the same ones.
    """
    if gradient_checkpointing and torch.is_grad_enabled():
        out_BTD: torch.Tensor = checkpoint(layer, x_BTD, use_reentrant=False, preserve_rng_state=draws)
    else:
        out_BTD = layer(x_BTD)
    return out_BTD


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
