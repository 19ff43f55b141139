"""The checks of the claims of this report, one file per subject, and the evidence that they share."""

# B batch, S tokens of a sequence, D width, F width of the feed-forward, R rank

from __future__ import annotations

import torch
from torch import nn

from ... import evidence
from ..conversion import convert
from ..model import SIZES, Decoder

LLAMA_8B, LLAMA_7B, GPT2 = "llama_8b", "llama_7b", "gpt2"

# overrides that give the report's configs a tiny model: the same loop, in a second on a CPU
SHRUNKEN = (
    "model.size=tiny_llama", "model.converted_layers=2", "model.first_converted=null", "model.rank=3",
    "data.context_length=12", "data.states=16", "training.steps=2", "training.gradient_accumulation_steps=2",
    "training.device=cpu", "optimizer.warmup_steps=0",
)  # fmt: skip


class Evidence(evidence.Evidence):
    incident_name, op = "npt_weight_delta", "npt_linear"

    @property
    def dims(self) -> dict[str, int]:
        """The dims in the report's text, and G, the width of the feed-forward of the 8B model in its table."""
        return super().dims | {"G": SIZES[LLAMA_8B].ffn_width}

    def trained(self, file: str) -> tuple[int, int]:
        """The number of layers that the config of ``file`` converts, and of the parameters that train in them."""
        config = self.config(file=file).model
        layers = convert(
            model(config.size), num_layers=config.converted_layers, first_layer=config.first_converted, rank=config.rank
        ).layers
        return len(layers), sum(part.numel() for layer in layers for part in (layer.a, layer.b))


def model(size: str) -> Decoder:
    """A model of the report, on the meta device."""
    with torch.device("meta"):
        return Decoder(SIZES[size])


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    """A float64 tensor of normally distributed numbers that requires a gradient."""
    draw = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return draw.requires_grad_()


def linear(width: int, ffn_width: int) -> nn.Linear:
    """A frozen projection in float64."""
    with evidence.fixed_seed():
        return nn.Linear(width, ffn_width, bias=False, dtype=torch.float64).requires_grad_(False)
