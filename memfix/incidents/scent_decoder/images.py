"""Synthetic images drawn from a seed: sums of waves of several frequencies, with values in [0, 1]."""

# B batch, N positions, P channels, R pixels along an edge, W waves

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..config import DataConfig, RunConfig
from ..examples import Examples, seeded
from ..schema import setting
from .model import CHANNELS

Images = dict[str, torch.Tensor]
"""``images`` is ``[B, P, R, R]``, ``coordinates`` is ``[B, N, 2]``, and ``pixels``, the targets, is ``[B, N, P]``."""


@dataclass(frozen=True)
class ImageData(DataConfig):
    resolution: int = setting(32, low=1, about="pixels along each edge of an image; the model decodes every pixel")
    images: int | None = setting(None, low=1, about="number of different images; null: no limit")
    waves: int = setting(
        6, low=1, about="waves per channel of an image, each with its own direction, phase and frequency"
    )
    lowest: float = setting(1.0, above=0, about="lowest number of periods of a wave over the image")
    highest: float = setting(8.0, above=0, about="highest number of periods of a wave over the image")

    def __post_init__(self) -> None:
        if self.highest < self.lowest:
            raise ValueError(f"highest must be at least lowest, {self.lowest}, got {self.highest}")


def image_batches(config: RunConfig) -> Callable[[Examples], Images]:
    data = config.data
    coordinates_N2 = pixel_centres(data.resolution)

    def distinct(examples: Examples) -> list[int]:
        return [number if data.images is None else number % data.images for number in examples.numbers]

    def batch(examples: Examples) -> Images:
        pixels_BNP = torch.stack(
            [waves(coordinates_N2, data, seeded("image", data.seed, number)) for number in distinct(examples)]
        )
        images = pixels_BNP.mT.unflatten(-1, (data.resolution, data.resolution)).contiguous()
        return {
            "images": images,
            "coordinates": coordinates_N2.repeat(len(examples), 1, 1),
            "pixels": pixels_BNP,
        }

    return batch


def pixel_centres(resolution: int) -> torch.Tensor:
    """The coordinates of the pixels' centres in [0, 1], row by row."""
    centres = (torch.arange(resolution) + 0.5) / resolution
    return torch.cartesian_prod(centres, centres)


def waves(coordinates_N2: torch.Tensor, data: ImageData, generator: torch.Generator) -> torch.Tensor:
    """Draw the channels of an image, ``[N, P]``. Frequencies are uniform on a logarithmic scale."""
    drawn_PW3 = torch.rand(CHANNELS, data.waves, 3, generator=generator)
    direction_PW, phase_PW = 2 * torch.pi * drawn_PW3[..., 0], 2 * torch.pi * drawn_PW3[..., 1]
    periods_PW = data.lowest * (data.highest / data.lowest) ** drawn_PW3[..., 2]
    along_PWN = torch.stack([direction_PW.cos(), direction_PW.sin()], -1) @ coordinates_N2.T
    waves_PWN = (2 * torch.pi * periods_PW[..., None] * along_PWN + phase_PW[..., None]).sin()
    return (0.5 + 0.5 * waves_PWN.mean(1)).T.contiguous()


def psnr(mean_squared_error: float) -> float:
    """The peak signal-to-noise ratio in dB, for values in [0, 1]."""
    return -10 * torch.tensor(mean_squared_error, dtype=torch.float64).log10().item()
