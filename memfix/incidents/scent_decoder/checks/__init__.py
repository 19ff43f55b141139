"""The checks of the claims of this report, one file per subject, and the evidence that they share."""

# B batch, N positions, M latent tokens, D width, H heads

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ....laws import NAIVE
from ... import evidence
from ...stand_in import saved_for_backward
from ..layers import Attention, FeedForward, PreNorm

# overrides that give the report's config a tiny model, which runs on a CPU
SHRUNKEN = (
    "model.hidden_dim=16", "model.latent_dim=8", "model.latent_tokens=4", "model.heads=2", "model.feature_dim=8",
    "data.resolution=4", "training.batch_size=2", "training.device=cpu",
)  # fmt: skip


class Evidence(evidence.Evidence):
    incident_name = "scent_decoder"

    @property
    def dims(self) -> dict[str, int]:
        """The dims of the report's config, F for the Fourier features, and e, the item size of float32."""
        config = self.config()
        model, positions = config.model, config.data.resolution**2
        return {
            "B": config.batch_size, "N": positions, "M": model.latent_tokens, "D": model.hidden_dim, "H": model.heads,
            "F": model.feature_dim, "e": 4,
        }  # fmt: skip

    def held(self, layer: Callable[[int], nn.Module], dtype: torch.dtype = torch.float32, **dims: int) -> int:
        """The bytes that a layer of width D holds for backward at the report's dims, without its input."""
        of = self.dims | dims
        with torch.device("meta"):
            made = layer(of["D"]).to(dtype)
            x = torch.empty(of["B"], of["N"], of["D"], dtype=dtype, requires_grad=True)
        return held_bytes(made, x)

    def held_by_model(self, *overrides: str) -> int:
        """The bytes that a forward of the report's model holds for backward, without its inputs."""
        batch_size, resolution = self.dims["B"], self.config(*overrides).data.resolution
        images = torch.empty(batch_size, 3, resolution, resolution, device="meta")
        return held_bytes(self.model(*overrides), images, torch.empty(batch_size, resolution**2, 2, device="meta"))


def naive_attention(width: int) -> nn.Module:
    """The report's attention, behind its norm."""
    return PreNorm(width, Attention(width, heads=8, form=NAIVE))


def naive_feed_forward(width: int) -> nn.Module:
    """The report's feed-forward, behind its norm."""
    return PreNorm(width, FeedForward(width, mult=4, form=NAIVE))


def held_bytes(layer: nn.Module, *inputs: torch.Tensor) -> int:
    """The bytes of all storages that autograd saves in a call, without parameters and inputs."""
    known = {tensor.untyped_storage()._cdata for tensor in (*layer.parameters(), *layer.buffers(), *inputs)}
    with saved_for_backward() as saved:
        out = layer(*inputs)
    assert out.requires_grad
    return sum(storage.nbytes() for key, storage in saved.items() if key not in known)


def count(model: nn.Module, kind: type[nn.Module]) -> int:
    """The number of modules of class ``kind`` in ``model``."""
    return sum(isinstance(module, kind) for module in model.modules())


def decoder_blocks(model: Any) -> nn.ModuleList:
    """The decoder's encoders and blocks, without the latent processor and the query to it."""
    return nn.ModuleList([model.bandwidth_lins, model.modulation_lins, model.hv_lins])
