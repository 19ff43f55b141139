"""Steps of image generators of ``diffusers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfix.meters.base import Step, StepBuilder

from .training import train


def _unet() -> Any:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), layers_per_block=1,
    )  # fmt: skip


def unet(device: str) -> Step:
    """Build a step that trains a UNet to predict the noise that the scheduler added."""
    from diffusers import DDPMScheduler

    scheduler = DDPMScheduler()

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        noise = torch.randn_like(batch["images"])
        times = torch.randint(0, scheduler.config.num_train_timesteps, (len(noise),), device=device)
        noisy = scheduler.add_noise(batch["images"], noise, times)
        return F.mse_loss(model(noisy, times).sample, noise)

    return train(_unet(), {"images": torch.randn(8, 3, 32, 32)}, device, loss_of=loss_of)


def sample(device: str) -> Step:
    from diffusers import DDIMScheduler

    model, scheduler = _unet().to(device).eval(), DDIMScheduler()
    scheduler.set_timesteps(4)

    @torch.no_grad()
    def step() -> torch.Tensor:
        image = torch.randn(4, 3, 32, 32, device=device)
        for time in scheduler.timesteps:
            image = scheduler.step(model(image, time).sample, time, image).prev_sample
        return image.clamp(-1, 1).cpu()

    return step


def autoencoder(device: str) -> Step:
    from diffusers import AutoencoderKL

    model = AutoencoderKL(
        block_out_channels=(32, 64), down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, norm_num_groups=16,
    )  # fmt: skip

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        images = batch["images"]
        posterior = model.encode(images).latent_dist
        return F.mse_loss(model.decode(posterior.sample()).sample, images) + 1e-6 * posterior.kl().mean()

    return train(model, {"images": torch.randn(2, 3, 64, 64)}, device, loss_of=loss_of)


def transformer(device: str) -> Step:
    from diffusers import DiTTransformer2DModel

    model = DiTTransformer2DModel(num_attention_heads=4, attention_head_dim=32, num_layers=2, sample_size=32)
    times, classes = torch.randint(0, 1000, (4,)), torch.tensor([1, 2, 3, 4])
    batch = {"latents": torch.randn(4, 4, 32, 32), "times": times, "classes": classes}

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        predicted = model(batch["latents"], timestep=batch["times"], class_labels=batch["classes"]).sample
        return predicted.square().mean()

    return train(model, batch, device, loss_of=loss_of)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    f"diffusers {name}": ("diffusers", build)
    for name, build in {
        "UNet, train step": unet, "UNet, sampling": sample, "AutoencoderKL": autoencoder, "DiT": transformer,
    }.items()
}  # fmt: skip
