"""The report's model: a latent processor of an image's patches, and a decoder of the image at any coordinates."""

# B batch, N positions, M latent tokens, A axes, C width of a latent token, D hidden width, P channels

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...meters.stages import stage
from ..config import RunConfig
from ..decoder_parts import run_layer
from ..schema import setting
from .layers import (
    ATTENTION_FORMS,
    FEED_FORWARD_FORMS,
    Attention,
    FeedForward,
    FourierFeatures,
    PreNorm,
    ResidualBlock,
    require_heads,
)

# stages of the forward pass
LATENTS, QUERY, BANDWIDTH, MODULATION, HIDDEN, OUTPUT = (
    "latent processor", "query to latents", "bandwidth", "modulation", "hidden values", "output and loss",
)  # fmt: skip

SELF, CROSS, FF, RESIDUAL = "self", "cross", "ff", "residual"
DECODERS = (SELF, CROSS, FF, RESIDUAL)
CHANNELS, AXES, MULT = 3, 2, 4


@dataclass(frozen=True)
class ModelConfig:
    """The ``model`` section."""

    decoder: str = setting(
        SELF,
        choices=DECODERS,
        about="self attends to all positions, cross to the latents, ff has no attention, residual has ResidualBlocks",
    )
    attention: str = setting("auto", choices=ATTENTION_FORMS, about="form of attention")
    feed_forward: str = setting("auto", choices=FEED_FORWARD_FORMS, about="form of geglu_feed_forward")
    feature_dim: int = setting(64, low=4, about="Fourier features per position, half cosines and half sines")
    hidden_dim: int = setting(512, low=1, about="width of the decoder")
    heads: int = setting(8, low=1, about="heads of each attention layer")
    num_layers: int = setting(
        3, low=1, about="layers per bandwidth or modulation encoder: one linear layer, then blocks"
    )
    layer_num: int = setting(2, low=1, about="number of scales")
    latent_tokens: int = setting(256, low=1, about="number of tokens in the latent processor; must be a square number")
    latent_dim: int = setting(256, low=1, about="width of a latent token, which is the decoder's context_dim")
    latent_layers: int = setting(2, low=1, about="number of blocks in the latent processor")
    bandwidth: float = setting(
        16.0, above=0.5, about="periods over the image at the finest scale; each coarser scale has half as many"
    )
    residual: bool = setting(
        True, about="add the input of attention and feed-forward to their output; false: the report's nn.Sequential"
    )
    dropout: float = setting(0.0, low=0, below=1, about="dropout of attention weights")
    query_chunk: int | None = setting(
        None,
        low=1,
        about="positions decoded at a time; decoder self takes so many queries, which attend to all positions",
    )

    def __post_init__(self) -> None:
        require_heads(self.hidden_dim, self.heads)
        require_heads(self.latent_dim, self.heads)
        if self.feature_dim % (2 * AXES):
            raise ValueError(f"feature_dim must be a multiple of {2 * AXES}, got {self.feature_dim}")
        if self.latent_edge**2 != self.latent_tokens:
            raise ValueError(f"latent_tokens must be a square number, got {self.latent_tokens}")
        if self.query_chunk is not None and self.decoder == SELF and self.attention not in ("auto", "query_chunks"):
            raise ValueError(f"query_chunk in decoder self needs attention auto or query_chunks, got {self.attention}")

    @property
    def latent_edge(self) -> int:
        return round(self.latent_tokens**0.5)


class Block(nn.Module):
    """Layers one after the other, with a context for each of them, which nn.Sequential cannot pass."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x_BND: torch.Tensor, context_BMC: torch.Tensor | None = None) -> torch.Tensor:
        for layer in self.layers:
            x_BND = layer(x_BND, context_BMC)
        return x_BND


class Encoder(nn.Module):
    """The parts of a bandwidth or modulation encoder: ``Linear``, ``ReLU``, then blocks."""

    def __init__(self, width: int, hidden_dim: int, blocks: Iterable[Block]) -> None:
        super().__init__()
        self.first = nn.Linear(width, hidden_dim)
        self.blocks = nn.ModuleList(blocks)


class ScentModel(nn.Module):
    """``model(images, coordinates)`` is the channels of every image at its coordinates, ``[B, N, P]``."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__()
        self.config = config = run.model
        self.gradient_checkpointing, self.draws = run.training.gradient_checkpointing, config.dropout > 0
        self.patch = run.data.resolution // config.latent_edge
        hidden, latent = config.hidden_dim, config.latent_dim
        self.patches = nn.Linear(CHANNELS * self.patch**2, latent)
        self.positions = nn.Parameter(torch.randn(config.latent_tokens, latent) * 0.02)
        self.latent_blocks = nn.ModuleList(
            Block([self._attention(latent), self._feed_forward(latent)]) for _ in range(config.latent_layers)
        )
        self.features = nn.ModuleList(
            FourierFeatures(config.feature_dim, config.bandwidth / 2 ** (config.layer_num - 1 - scale))
            for scale in range(config.layer_num)
        )
        self.query = nn.Linear(config.feature_dim, hidden)
        self.to_latents = self._attention(hidden, latent)
        self.bandwidth_lins, self.modulation_lins = (
            nn.ModuleList(
                Encoder(width, hidden, (self._block() for _ in range(config.num_layers - 1)))
                for _ in range(config.layer_num)
            )
            for width in (config.feature_dim, hidden)
        )
        self.hv_lins = nn.ModuleList(self._block() for _ in range(config.layer_num - 1))
        self.out_lins = nn.ModuleList(nn.Linear(hidden, CHANNELS) for _ in range(config.layer_num))

    # ---------------------------------------------------------------- parts
    def _attention(self, width: int, context_dim: int | None = None, queries_per_chunk: int | None = None) -> PreNorm:
        config = self.config
        form = "query_chunks" if queries_per_chunk is not None else config.attention
        layer = Attention(
            width, context_dim, config.heads, form=form, dropout=config.dropout, queries_per_chunk=queries_per_chunk
        )
        return PreNorm(width, layer, context_dim, residual=config.residual)

    def _feed_forward(self, width: int) -> PreNorm:
        return PreNorm(width, FeedForward(width, MULT, form=self.config.feed_forward), residual=self.config.residual)

    def _block(self) -> Block:
        """A block of the decoder."""
        config, width = self.config, self.config.hidden_dim
        if config.decoder == RESIDUAL:
            return Block([ResidualBlock(width)])
        if config.decoder == FF:
            return Block([self._feed_forward(width), self._feed_forward(width)])
        if config.decoder == CROSS:
            return Block([self._attention(width, config.latent_dim), self._feed_forward(width)])
        return Block([self._attention(width, queries_per_chunk=config.query_chunk), self._feed_forward(width)])

    # ---------------------------------------------------------------- the forward pass
    def latents(self, images_BPRR: torch.Tensor) -> torch.Tensor:
        """The latent tokens of the images, ``[B, M, C]``."""
        stage(LATENTS)
        patches = images_BPRR.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        patches_BMX = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x_BMC = self.patches(patches_BMX.to(self.patches.weight.dtype)) + self.positions
        return self._run(self.latent_blocks, x_BMC)

    def decode(self, latents_BMC: torch.Tensor, coordinates_BNA: torch.Tensor) -> torch.Tensor:
        """The channels at the given coordinates, ``[B, N, P]``."""
        features = [one(coordinates_BNA).to(self.query.weight.dtype) for one in self.features]
        stage(QUERY)
        found_BND = self.to_latents(self.query(features[-1]), latents_BMC)
        stage(BANDWIDTH)
        bands = [self._encode(lin, of, latents_BMC) for lin, of in zip(self.bandwidth_lins, features, strict=True)]
        stage(MODULATION)
        modulations = [self._encode(lin, found_BND, latents_BMC) for lin in self.modulation_lins]
        stage(HIDDEN)
        skips = [band + modulation for band, modulation in zip(bands, modulations, strict=True)]
        del bands, modulations
        values = [skips[0]]
        for skip, block in zip(skips[1:], self.hv_lins, strict=True):
            values.append(self._run([block], values[-1] + skip, latents_BMC))
        stage(OUTPUT)
        return sum(lin(value) for lin, value in zip(self.out_lins, values, strict=True))

    def forward(self, images_BPRR: torch.Tensor, coordinates_BNA: torch.Tensor) -> torch.Tensor:
        latents_BMC = self.latents(images_BPRR)
        size = self.config.query_chunk
        if size is None or self.config.decoder == SELF:
            return self.decode(latents_BMC, coordinates_BNA)
        # positions do not depend on each other, so chunks of them are decoded, and decoded again in backward
        chunks = [
            run_layer(self.decode, latents_BMC, some, draws=self.draws) for some in coordinates_BNA.split(size, 1)
        ]
        return torch.cat(chunks, 1)

    def _encode(self, encoder: Any, x_BND: torch.Tensor, latents_BMC: torch.Tensor) -> torch.Tensor:
        return self._run(encoder.blocks, encoder.first(x_BND).relu(), latents_BMC)

    def _run(
        self, blocks: Iterable[nn.Module], x_BND: torch.Tensor, context_BMC: torch.Tensor | None = None
    ) -> torch.Tensor:
        for block in blocks:
            x_BND = run_layer(
                block, x_BND, context_BMC, gradient_checkpointing=self.gradient_checkpointing, draws=self.draws
            )
        return x_BND
