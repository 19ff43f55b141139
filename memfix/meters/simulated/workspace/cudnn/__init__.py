"""The workspace of cuDNN's convolutions: the library is asked where it is installed, else it is estimated."""

from __future__ import annotations

import torch

from ...gpus import GPU
from ...tables import table_of
from ..rules import Range
from .convolution import Convolution, Part
from .estimate import estimated
from .library import version
from .plans import Settings, first_plan

__all__ = ["Convolution", "Part", "cudnn_workspace", "source"]

_KNOWN_VERSION, _KNOWN_CAPABILITY = 91900, (9, 0)
"""For which answers without a GPU were compared with an H200: 809 of 812 ordinary convolutions have the same engine.
The other three are in channels first, and have groups or are gradients of the weight."""
_SPREADING = {("forward", 62), ("forward", 67), ("image", 67), ("image", 71), ("weight", 65), ("weight", 68)}
"""Engines that spread sums over the multiprocessors, of which the library does not know the number without a GPU."""
_TILE_BYTES = 256 * 128 * 4  # the largest partial sum of one multiprocessor


def cudnn_workspace(gpu: GPU, convolution: Convolution) -> Range:
    """The bytes that cuDNN takes on ``gpu`` under the settings of ``torch.backends.cudnn``."""
    estimate, settings = estimated(convolution), _settings()
    plan = first_plan(gpu, convolution, settings) if _is_suggested(convolution) else None
    if plan is None:
        return estimate
    is_known = (version(), gpu.capability, settings) == (_KNOWN_VERSION, _KNOWN_CAPABILITY, Settings())
    if torch.backends.cudnn.benchmark or not is_known or not _is_sure(convolution):
        return Range(0, plan.workspace, max(plan.workspace, estimate.most))
    if (convolution.part, plan.engine) not in _SPREADING:
        return Range.of(plan.workspace)
    sums = gpu.multiprocessors * _TILE_BYTES
    return Range(max(0, plan.workspace - sums), plan.workspace, plan.workspace + sums)


def _is_suggested(convolution: Convolution) -> bool:
    """Whether the library suggests the engines without a GPU that run on one: not cuBLAS, nor some depthwise ones."""
    is_sum = convolution.part == "weight" and convolution.dtype.itemsize == 4
    return not convolution.is_pointwise and (is_sum or not convolution.is_depthwise)


def _is_sure(convolution: Convolution) -> bool:
    """Whether the first suggestion without a GPU is always the one that runs on it."""
    if convolution.is_depthwise:
        return False
    return convolution.channels_last or (convolution.groups == 1 and convolution.part != "weight")


def _settings() -> Settings:
    backend = torch.backends.cudnn
    try:
        return Settings(backend.deterministic, backend.allow_tf32)
    except RuntimeError:  # the flags of convolutions and recurrent layers differ
        precision = backend.conv.fp32_precision  # type: ignore[attr-defined]
        return Settings(backend.deterministic, precision != "ieee")


def source(gpu: GPU) -> str:
    """What the bytes rest on: the version of the library that was asked, or the shapes alone."""
    asked, table = version(), table_of(gpu)
    if asked is None:
        return "estimated by its shape"
    measured = table.surroundings.get("cudnn") if table else None
    other = "" if measured in (None, str(asked)) else f", where {_spelled(int(measured))} was measured on {gpu.name}"
    return f"asked of cuDNN {_spelled(asked)} without a GPU{other}"


def _spelled(number: int) -> str:
    """``9.19.0`` for 91900"""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
