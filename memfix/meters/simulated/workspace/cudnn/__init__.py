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

_TILE_BYTES = 256 * 128 * 4  # the largest partial sum of one multiprocessor


def cudnn_workspace(gpu: GPU, convolution: Convolution) -> Range:
    """The bytes that cuDNN takes on ``gpu`` under the settings of ``torch.backends.cudnn``.

    The library's answer is the usual amount and never more than that: without a GPU it does not know how many
    multiprocessors share a sum, and lacks some engines. On an H200, 9 of 4,493 plans that looked sure were others.
    """
    estimate = estimated(convolution)
    plan = first_plan(gpu, convolution, _settings()) if _is_suggested(convolution) else None
    if plan is None:
        return estimate
    return Range(0, plan.workspace, max(estimate.most, plan.workspace + gpu.multiprocessors * _TILE_BYTES))


def _is_suggested(convolution: Convolution) -> bool:
    """Whether the library suggests the engines without a GPU that run on one: not cuBLAS, nor some depthwise ones."""
    is_sum = convolution.part == "weight" and convolution.dtype.itemsize == 4
    return not convolution.is_pointwise and (is_sum or not convolution.is_depthwise)


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
