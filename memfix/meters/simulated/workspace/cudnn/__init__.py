"""The workspace of cuDNN's convolutions: measured, or queried from the library if it is installed, or estimated."""

from __future__ import annotations

import torch

from ...gpus import GPU
from ...tables import table_of
from ..rules import Range
from .convolution import Convolution, Part
from .estimate import COUNTERS_BYTES, estimated, has_many_tiles
from .library import version
from .plans import Plan, Settings, first_plan

__all__ = ["Convolution", "Part", "cudnn_workspace", "origin_of_workspace"]

_TILE_BYTES = 256 * 128 * 4  # the largest partial sum of one multiprocessor
_SHARING_ENGINES = {62, 65, 67, 68, 71}
"""Numbers of the engines in which several multiprocessors may add to one sum."""


def cudnn_workspace(gpu: GPU, convolution: Convolution) -> Range:
    """The bytes that cuDNN takes on ``gpu`` under the settings of ``torch.backends.cudnn``.

    They are exact if this convolution was measured. Otherwise the library's answer is only the usual amount: without
    a GPU the library does not know how many multiprocessors share a sum, and it lacks some engines. On an H200, 2,982
    of 3,443 answers were exact.
    """
    settings = _settings()
    measured = _measured(gpu, convolution, settings)
    if measured is not None:
        return Range.of(measured)
    estimate = estimated(convolution)
    plan = first_plan(gpu, convolution, settings) if _is_suggested(convolution) else None
    if plan is None:
        return estimate
    most = max(estimate.most, plan.workspace + gpu.multiprocessors * _TILE_BYTES)
    return Range(0, _without_counters(convolution, plan), most)


def _measured(gpu: GPU, convolution: Convolution, settings: Settings) -> int | None:
    """The workspace that was measured on ``gpu``. It is None under other settings than torch's defaults, under which
    tables are measured, and if another version of the library is installed."""
    table = table_of(gpu)
    if table is None or torch.backends.cudnn.benchmark or settings != Settings():
        return None
    return table.convolutions.get(convolution.spelled) if version() in (None, table.cudnn) else None


def _without_counters(convolution: Convolution, plan: Plan) -> int:
    """The workspace of a plan on a GPU. Without a GPU, the library always includes counters for multiprocessors that
    add to one sum; with a GPU, only if there are many tiles."""
    counts = plan.engine in _SHARING_ENGINES and plan.workspace % 16 == COUNTERS_BYTES % 16
    return plan.workspace - COUNTERS_BYTES * (counts and not has_many_tiles(convolution))


def _is_suggested(convolution: Convolution) -> bool:
    """Whether the library suggests the same engines without a GPU as with one: not cuBLAS, nor some depthwise ones."""
    is_sum = convolution.part == "weight" and convolution.dtype.itemsize == 4
    return not convolution.is_pointwise and (is_sum or not convolution.is_depthwise)


def _settings() -> Settings:
    backend = torch.backends.cudnn
    is_deterministic = backend.deterministic or torch.are_deterministic_algorithms_enabled()
    try:
        return Settings(is_deterministic, backend.allow_tf32)
    except RuntimeError:  # the flags of convolutions and recurrent layers differ
        precision = backend.conv.fp32_precision  # type: ignore[attr-defined]
        return Settings(is_deterministic, precision != "ieee")


def origin_of_workspace(gpu: GPU) -> str:
    """The origin of the bytes, for people: the version of the library that was queried, or the shapes alone."""
    asked, table = version(), table_of(gpu)
    if asked is None:
        return "estimated by its shape"
    measured = table.cudnn if table else None
    other = "" if measured in (None, asked) else f", where {_dotted(measured)} was measured on {gpu.name}"
    return f"asked of cuDNN {_dotted(asked)} without a GPU{other}"


def _dotted(number: int) -> str:
    """Return a version as text, such as ``9.19.0`` for 91900."""
    return f"{number // 10_000}.{number // 100 % 100}.{number % 100}"
