"""The architectures of ``torchvision``: every builder of a model that trains without other packages."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memfix.meters.base import StepBuilder

from ..third_party.training import Batch
from .package import Attempt, Package
from .steps import require_few_parameters, trained

_Settings = Mapping[str, Any]


def _pictures(pixels: int) -> Batch:
    return {"images": torch.randn(2, 3, pixels, pixels)}


def _films(pixels: int) -> Batch:
    return {"images": torch.randn(2, 3, 16, pixels, pixels)}


def _pairs(pixels: int) -> Batch:
    return {"first": torch.randn(2, 3, pixels, pixels), "second": torch.randn(2, 3, pixels, pixels)}


def _scenes(pixels: int) -> Batch:
    """Return images with two objects each."""
    boxes = torch.tensor([[0.1, 0.1, 0.6, 0.5], [0.2, 0.3, 0.9, 0.9]]) * pixels
    masks, keypoints = torch.zeros(2, pixels, pixels, dtype=torch.uint8), torch.ones(2, 17, 3)
    for mask, keypoint, (left, top, right, bottom) in zip(masks, keypoints, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
        keypoint[:, :2] = torch.tensor([(left + right) / 2, (top + bottom) / 2])
    target = {"boxes": boxes, "labels": torch.tensor([1, 2]), "masks": masks, "keypoints": keypoints}
    return {"images": [torch.randn(3, pixels, pixels) for _ in range(2)], "targets": [target, target]}


def _of_images(model: nn.Module, batch: Any) -> Any:
    return model(batch["images"])


def _of_scenes(model: nn.Module, batch: Any) -> Any:
    return model(batch["images"], batch["targets"])


def _of_pairs(model: nn.Module, batch: Any) -> Any:
    return model(batch["first"], batch["second"], num_flow_updates=2)


@dataclass(frozen=True)
class _Task:
    """The module of its builders, what makes its batches, the image sizes to try in turn, and what calls a model."""

    module: str
    batch: Callable[[int], Batch]
    pixels: tuple[int, ...]
    call: Callable[[nn.Module, Any], Any] = _of_images
    settings: Callable[[int], _Settings] = lambda pixels: {"num_classes": 10, "image_size": pixels}


_TASKS: dict[str, _Task] = {
    "image classification": _Task("", _pictures, (64, 128, 224, 299)),
    "image classification, to be quantized": _Task("quantization", _pictures, (64, 128, 224, 299)),
    "semantic segmentation": _Task("segmentation", _pictures, (64, 128)),
    "object detection": _Task(
        "detection", _scenes, (128, 320), _of_scenes,
        lambda pixels: {"num_classes": 10, "min_size": pixels, "max_size": pixels},
    ),
    "video classification": _Task(
        "video", _films, (64, 112, 224), settings=lambda pixels: {"num_classes": 10, "spatial_size": (pixels, pixels)}
    ),
    "optical flow": _Task("optical_flow", _pairs, (128,), _of_pairs, lambda pixels: {}),
}  # fmt: skip


def _architectures() -> dict[str, tuple[str, str]]:
    from torchvision import models

    return {
        f"{task}: {name}": (task, name)
        for task, of_task in _TASKS.items()
        for name in models.list_models(getattr(models, of_task.module) if of_task.module else models)
    }


def _attempts(task: str, name: str) -> Iterator[Attempt]:
    from torchvision import models

    builder = models.get_model_builder(name)
    named = inspect.signature(builder).parameters
    without = {each: None for each in ("weights", "weights_backbone") if each in named}
    for pixels in _TASKS[task].pixels:
        settings = _TASKS[task].settings(pixels)
        for names in (settings.keys(), settings.keys() - {"image_size", "spatial_size"}, ()):
            chosen = {each: value for each, value in settings.items() if each in names}
            yield functools.partial(_step, task, functools.partial(builder, **without, **chosen), pixels)


def _step(task: str, make: Callable[[], nn.Module], pixels: int) -> StepBuilder:
    require_few_parameters(make)
    return trained(make, _TASKS[task].batch(pixels), _TASKS[task].call)


PACKAGE = Package("torchvision", _architectures, _attempts)
