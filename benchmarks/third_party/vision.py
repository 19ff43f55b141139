"""Steps of image networks of ``torchvision`` and ``timm``."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from memfix.meters.base import Step, StepBuilder

from .training import classified, images, train


def torchvision_net(name: str, device: str, *, num_images: int = 4, **options: Any) -> Step:
    """Build a step that trains a classifier with SGD, as in torchvision's own training script."""
    from torchvision import models

    model = getattr(models, name)(num_classes=10)
    sgd = {"optimizer": torch.optim.SGD, "lr": 0.1, "momentum": 0.9}
    return train(model, images(num_images), device, loss_of=classified, **sgd, **options)


def resnet_channels_last(device: str) -> Step:
    from torchvision.models import resnet50

    model = resnet50(num_classes=10).to(memory_format=torch.channels_last)
    batch = images(4)
    batch = {**batch, "images": batch["images"].to(memory_format=torch.channels_last)}
    return train(model, batch, device, loss_of=classified, autocast=torch.bfloat16)


def resnet_inference(device: str) -> Step:
    from torchvision.models import resnet18

    model = resnet18().to(device).eval()
    batch = torch.randn(8, 3, 224, 224)

    @torch.inference_mode()
    def step() -> list[int]:
        return model(batch.to(device)).argmax(1).tolist()

    return step


def segmentation(device: str) -> Step:
    from torchvision.models.segmentation import fcn_resnet50

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch["images"])["out"], batch["classes"])

    batch = {"images": torch.randn(2, 3, 128, 128), "classes": torch.randint(0, 21, (2, 128, 128))}
    return train(fcn_resnet50(weights=None, weights_backbone=None), batch, device, loss_of=loss_of)


def video(device: str) -> Step:
    from torchvision.models.video import r3d_18

    batch = {"images": torch.randn(1, 3, 8, 112, 112), "classes": torch.randint(0, 10, (1,))}
    return train(r3d_18(num_classes=10), batch, device, loss_of=classified)


def timm_net(name: str, device: str, **settings: Any) -> Step:
    import timm

    model = timm.create_model(name, num_classes=10, **settings)
    return train(model, images(4), device, loss_of=classified)


def timm_mixup(device: str) -> Step:
    """Build a step that trains on mixed images and soft labels, with a moving average of the weights."""
    import timm
    from timm.data import Mixup
    from timm.loss import SoftTargetCrossEntropy
    from timm.utils import ModelEmaV3

    model = timm.create_model("vit_tiny_patch16_224", num_classes=10)
    mixup, soft_loss = Mixup(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=10), SoftTargetCrossEntropy()
    averages: list[Any] = []

    def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
        if not averages:
            averages.append(ModelEmaV3(model))
        averages[0].update(model)
        mixed, labels = mixup(batch["images"], batch["classes"])
        return soft_loss(model(mixed), labels)

    return train(model, images(4), device, loss_of=loss_of)


STEPS: dict[str, tuple[str, StepBuilder]] = {
    **{
        f"torchvision {name}": ("torchvision", build)
        for name, build in {
            "ResNet-18": partial(torchvision_net, "resnet18"),
            "ResNet-50, channels last, autocast": resnet_channels_last,
            "ResNet-18, inference": resnet_inference,
            "MobileNet v3, float16": partial(torchvision_net, "mobilenet_v3_small", autocast=torch.float16),
            "SqueezeNet": partial(torchvision_net, "squeezenet1_1"),
            "VGG-11": partial(torchvision_net, "vgg11_bn", num_images=2),
            "ConvNeXt": partial(torchvision_net, "convnext_tiny", num_images=2),
            "ViT-B/16": partial(torchvision_net, "vit_b_16", num_images=2),
            "Swin": partial(torchvision_net, "swin_t", num_images=2),
            "FCN ResNet-50, segmentation": segmentation,
            "R3D-18, video": video,
        }.items()
    },
    **{
        f"timm {name}": ("timm", build)
        for name, build in {
            "ConvNeXt atto": partial(timm_net, "convnext_atto", drop_path_rate=0.1),
            "Swin tiny": partial(timm_net, "swin_tiny_patch4_window7_224", drop_path_rate=0.1),
            "EfficientNet-B0": partial(timm_net, "efficientnet_b0", drop_path_rate=0.1),
            "RegNetY": partial(timm_net, "regnety_002"),
            "MLP-Mixer": partial(timm_net, "mixer_s32_224"),
            "ViT tiny, mixup": timm_mixup,
        }.items()
    },
}
