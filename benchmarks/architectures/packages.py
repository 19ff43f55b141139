"""The packages whose architectures are predicted, by the names of their distributions."""

from __future__ import annotations

from . import of_diffusers, of_timm, of_torch_geometric, of_torchvision, of_transformers
from .package import Package

PACKAGES: dict[str, Package] = {
    "transformers": of_transformers.PACKAGE,
    "timm": of_timm.PACKAGE,
    "torchvision": of_torchvision.PACKAGE,
    "diffusers": of_diffusers.PACKAGE,
    "torch-geometric": of_torch_geometric.PACKAGE,
}
