"""The SCENT-style decoder as an incident: its model and images, and the report's ranking of solutions."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import UsageError
from ...units import format_bytes
from .. import decoder_parts
from ..config import RunConfig
from ..incident import Growth, Incident
from ..profile import ReportedRun
from ..staged_reading import StagedReading
from .images import ImageData, Images, image_batches, psnr
from .model import ModelConfig, ScentModel


def _resolved(config: RunConfig) -> RunConfig:
    """Refuse an image that cannot be cut into the latent processor's tokens."""
    edge, resolution = config.model.latent_edge, config.data.resolution
    if resolution % edge:
        raise UsageError(
            f"data.resolution must be a multiple of {edge}, because {config.model.latent_tokens} latent tokens are "
            f"{edge} x {edge} patches of an image; got {resolution}"
        )
    return config


def _loss(model: torch.nn.Module, batch: Images) -> torch.Tensor:
    """The mean squared error of each image, added up."""
    found_BNP = model(batch["images"], batch["coordinates"]).float()
    return (found_BNP - batch["pixels"]).square().mean((1, 2)).sum()


def num_parameters(config: RunConfig) -> int:
    with torch.device("meta"):
        return decoder_parts.num_parameters(ScentModel(config))


def _describe(config: RunConfig) -> list[str]:
    model, resolution = config.model, config.data.resolution
    return [
        f"decoder {model.decoder}, {num_parameters(config):,} parameters",
        f"{config.batch_size} x {resolution} x {resolution} pixels",
        f"attention/{model.attention}",
        f"geglu_feed_forward/{model.feed_forward}",
    ]


# ---------------------------------------------------------------- beside the report
CHECKPOINT, BATCH_16 = "training.gradient_checkpointing=true", "training.batch_size=16"
ATTENTION, FEED_FORWARD = "model.attention=auto", "model.feed_forward=auto"
TWO_LAYERS, BF16 = "model.num_layers=2", "training.precision=bfloat16"

FLOAT32_RUNS = (
    ReportedRun("original", (), "~40 GB", "SCN-15"),
    ReportedRun("1: feed-forwards alone", ("model.decoder=ff",), "~5 GB", "SCN-36"),
    ReportedRun("2: attention to 256 latents", ("model.decoder=cross",), "18 -> 4.5 GB", "SCN-27"),
    ReportedRun("3: batch 16", (BATCH_16,), "10 GB", "SCN-28"),
    ReportedRun("4: checkpointing", (CHECKPOINT,), "~50 % less", "SCN-31"),
    ReportedRun("5: 16 x 16 pixels", ("data.resolution=16",), "not recommended", "SCN-33"),
    ReportedRun("5: num_layers 2", (TWO_LAYERS,), "not recommended", "SCN-33"),
    ReportedRun("ResidualBlocks", ("model.decoder=residual",), "O(N)", "SCN-17"),
    ReportedRun("our attention", (ATTENTION,), "", "SCN-43"),
    ReportedRun("our attention and feed-forward", (ATTENTION, FEED_FORWARD), "", "SCN-43"),
    ReportedRun("both, checkpointed", (ATTENTION, FEED_FORWARD, CHECKPOINT), "", "SCN-43"),
    ReportedRun("1 with our feed-forward", ("model.decoder=ff", ATTENTION, FEED_FORWARD), "", "SCN-36"),
)
RUNS = (
    *FLOAT32_RUNS,
    *(ReportedRun(f"{run.name}, bfloat16", (*run.overrides, BF16), "", "SCN-44") for run in FLOAT32_RUNS),
)


def _conclusions(measured: StagedReading) -> Iterator[str]:
    peak, capacity = measured.peak_bytes, measured.capacity_bytes
    fits = "fits in" if peak <= capacity else "does not fit in"
    yield f"the peak of {format_bytes(peak)} {fits} {format_bytes(capacity)}"


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=ImageData,
    resolved=_resolved,
    build=ScentModel,
    data=image_batches,
    loss=_loss,
    quality=lambda loss: f"PSNR {psnr(loss):.2f} dB",
    config="config.yaml",
    capacity="40GiB",  # the report's card
    grows=(
        Growth("training.batch_size", unit="images"),
        Growth("data.resolution", unit="pixels along an edge", multiple_of=lambda config: config.model.latent_edge),
    ),
    describe=_describe,
    warm_up=lambda batch: {name: tensor[:1] for name, tensor in batch.items()},
    runs=RUNS,
    num_parameters=num_parameters,
    conclusions=_conclusions,
)
