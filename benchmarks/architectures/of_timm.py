"""The architectures of ``timm``: an image classifier of each family of each of its modules."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from memfix.meters.base import StepBuilder

from .package import Attempt, Package
from .steps import trained

_SIZES = (
    "test atto femto pico nano xxtiny xxxs xxs xtiny xs tiny mini _s0 _m0 _t0 _b0 _s1 _m1 _b1 small _s _xt _t "
    "_m _b medium base"
).split()
"""Words for the size of a model in its name, from small to large."""
_PIXELS = (64, 128, 224, 256, 299, 331)
"""The image sizes to try in turn."""


def _architectures() -> dict[str, tuple[str, str]]:
    """Return the smallest model, by its name, of every family of a module."""
    import timm

    families: dict[tuple[str, str], list[str]] = {}
    for name in timm.list_models():
        module = timm.model_entrypoint(name).__module__.rpartition(".")[2]
        family = re.match("(tf_|test_)?[a-z]+(v[0-9])?", name)
        assert family is not None, f"a model's name begins with a word, got {name}"
        families.setdefault((module, family[0]), []).append(name)
    chosen = [(module, min(names, key=_size_by_name)) for (module, _), names in families.items()]
    return {f"image classification: {name}": ("image classification", name) for _, name in sorted(chosen)}


def _size_by_name(name: str) -> tuple[int, list[int], str]:
    """Return a key that sorts the models of a family by their sizes."""
    named = [rank for rank, word in enumerate(_SIZES) if word in name]
    return min(named, default=len(_SIZES)), [int(number) for number in re.findall("[0-9]+", name)], name


def _attempts(task: str, name: str) -> Iterator[Attempt]:
    """Try small images first. Not every model takes the size of its images as a setting."""
    for pixels in _PIXELS:
        yield functools.partial(_classifier, name, pixels, {"img_size": pixels})
        yield functools.partial(_classifier, name, pixels, {})


def _classifier(name: str, pixels: int, settings: dict[str, Any]) -> StepBuilder:
    import timm

    channels = timm.models.get_pretrained_cfg_value(name, "input_size")[0]
    make = functools.partial(timm.create_model, name, num_classes=10, **settings)
    return trained(make, {"images": torch.randn(2, channels, pixels, pixels)}, _classified)


def _classified(model: nn.Module, batch: Any) -> Any:
    return model(batch["images"])


PACKAGE = Package("timm", _architectures, _attempts)
