"""An incident of its own folder: a small network finds by how much drawn images are brighter than noise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from memfix.incidents.config import DataConfig, RunConfig
from memfix.incidents.examples import Examples
from memfix.incidents.incident import Growth, Incident
from memfix.incidents.schema import setting
from memfix.meters.stages import stage


@dataclass(frozen=True)
class ModelConfig:
    width: int = setting(16, low=1, about="width of the hidden layer")


@dataclass(frozen=True)
class ImageData(DataConfig):
    pixels: int = setting(8, low=1, about="pixels along each edge of an image")


class Network(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        self.first = nn.Linear(config.data.pixels**2, config.model.width)
        self.last = nn.Linear(config.model.width, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stage("pixels")
        hidden = self.first(images.flatten(1)).relu()
        stage("brightness")
        return self.last(hidden).squeeze(1)


def data(config: RunConfig) -> Callable[[Examples], dict[str, torch.Tensor]]:
    def batch(examples: Examples) -> dict[str, torch.Tensor]:
        edges = (config.data.pixels, config.data.pixels)
        noise = torch.stack([torch.randn(edges, generator=generator) for generator in examples.generators()])
        brightness = torch.tensor([number % 5 - 2.0 for number in examples.numbers])
        return {"images": noise + brightness[:, None, None], "brightness": brightness}

    return batch


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=ImageData,
    build=Network,
    data=data,
    loss=lambda model, batch: ((model(batch["images"]) - batch["brightness"]) ** 2).sum(),
    config="small.yaml",
    grows=(Growth("training.batch_size", unit="images"), Growth("model.width", unit="channels")),
)
