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

Images = dict[str, torch.Tensor]


@dataclass(frozen=True)
class ModelConfig:
    width: int = setting(16, low=1, about="of the hidden layers")
    depth: int = setting(2, low=1, about="hidden layers")


@dataclass(frozen=True)
class ImageData(DataConfig):
    pixels: int = setting(8, low=1, about="along each edge of an image")


class Network(nn.Module):
    def __init__(self, config: RunConfig) -> None:
        super().__init__()
        width = config.model.width
        self.first = nn.Linear(config.data.pixels**2, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(config.model.depth))
        self.last = nn.Linear(width, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        stage("pixels")
        x = self.first(images.flatten(1)).relu()
        stage("layers")
        for layer in self.layers:
            x = x + layer(x).relu()
        brightness: torch.Tensor = self.last(x).squeeze(1)
        return brightness


def data(config: RunConfig) -> Callable[[Examples], Images]:
    pixels = config.data.pixels

    def batch(examples: Examples) -> Images:
        noise = torch.stack([torch.randn(pixels, pixels, generator=one) for one in examples.generators()])
        brightness = torch.tensor([number % 5 - 2.0 for number in examples.numbers])
        return {"images": noise + brightness[:, None, None], "brightness": brightness}

    return batch


def loss(model: nn.Module, batch: Images) -> torch.Tensor:
    return ((model(batch["images"]) - batch["brightness"]) ** 2).sum()


incident = Incident(
    package=__package__,
    model_schema=ModelConfig,
    data_schema=ImageData,
    build=Network,
    data=data,
    loss=loss,
    layers=lambda model: model.layers,
    config="small.yaml",
    grows=(Growth("training.batch_size", unit="images"), Growth("model.depth", unit="layers")),
    describe=lambda config: [f"{config.data.pixels} x {config.data.pixels} pixels"],
)
