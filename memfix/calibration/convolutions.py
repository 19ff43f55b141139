"""Measure cuDNN's workspace on this machine's GPU, separately for a convolution's output and each gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..meters.base import StepBuilder
from ..meters.simulated import SimulatedMeter
from ..meters.simulated.gpus import GPU, H200
from ..meters.simulated.patches import applied
from ..meters.simulated.tables import SHIPPED, file_name, read_table
from ..meters.simulated.workspace import Range, convolving
from ..meters.simulated.workspace.cudnn import Convolution
from ..meters.simulated.workspace.memory_formats import CHANNELS_LAST
from ..progress import Say
from .observe import measured_call

aten = torch.ops.aten
_EMPTY_CACHE_EVERY = 200


def known_convolutions() -> list[Convolution]:
    """The convolutions of well-known networks, from the table that was measured on an H200."""
    return [Convolution.parsed(spelled) for spelled in read_table(SHIPPED / file_name(H200)).convolutions]


def convolutions_of(build: StepBuilder) -> list[Convolution]:
    """The convolutions that a step runs in cuDNN, found by simulating the step."""
    asked: dict[Convolution, None] = {}

    def answer(_: GPU, convolution: Convolution) -> Range:
        asked[convolution] = None
        return Range.of(0)

    with applied([(convolving, "cudnn_workspace", answer)]):
        SimulatedMeter().measure(build)
    return [*asked]


def workspaces(convolutions: Iterable[Convolution], say: Say) -> Mapping[str, int]:
    """The workspace of each convolution, keyed by its spelling."""
    found: dict[str, int] = {}
    for number, convolution in enumerate(convolutions):
        say(convolution.spelled)
        found[convolution.spelled] = workspace_of(convolution)
        if number % _EMPTY_CACHE_EVERY == 0:
            torch.cuda.empty_cache()
    return found


def workspace_of(convolution: Convolution) -> int:
    """The bytes that torch requests besides the result, in the second run: in the first, cuDNN chooses a plan."""
    run = _run_of(convolution)
    run()
    _, hidden, _ = measured_call(run)
    return hidden


def _run_of(convolution: Convolution) -> Callable[[], Any]:
    image, weight, grad = (
        _dense(convolution, shape) for shape in (convolution.image, convolution.weight, convolution.output)
    )
    geometry = [*map(list, (convolution.stride, convolution.padding, convolution.dilation))]
    rest = (*geometry, False, [0] * len(convolution.stride), convolution.groups)
    if convolution.part == "forward":
        return lambda: aten.convolution.default(image, weight, None, *rest)
    mask = [convolution.part == "image", convolution.part == "weight", False]
    return lambda: aten.convolution_backward.default(grad, image, weight, None, *rest, mask)


def _dense(convolution: Convolution, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = torch.empty(math.prod(shape), dtype=convolution.dtype, device="cuda").normal_().view(shape)
    return tensor.to(memory_format=CHANNELS_LAST[len(shape)]) if convolution.channels_last else tensor
