"""A call of cuDNN for a convolution, as torch describes it to the library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from ..layout import contiguous_strides

Part = Literal["forward", "image", "weight"]
"""What is computed: the output, the gradient of the image, or the gradient of the weight."""


@dataclass(frozen=True)
class Convolution:
    """``image`` convolved with ``weight`` is ``output``; ``part`` says which of the three cuDNN computes.

    All three are dense, in channels last or channels first. The weight has ``channels // groups`` input channels, by
    which cuDNN knows the groups.
    """

    part: Part
    dtype: torch.dtype
    image: tuple[int, ...]
    weight: tuple[int, ...]
    output: tuple[int, ...]
    channels_last: bool
    padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def groups(self) -> int:
        return self.image[1] // self.weight[1]

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.image[1] > 1

    @property
    def is_pointwise(self) -> bool:
        """Whether it is a matrix product: of one pixel each, at every pixel."""
        is_plain = set(self.weight[2:]) | set(self.stride) == {1} and not any(self.padding)
        return is_plain and self.groups == 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The bytes of the image, the weight and the output."""
        image, weight, output = (math.prod(shape) for shape in (self.image, self.weight, self.output))
        return image * self.dtype.itemsize, weight * self.dtype.itemsize, output * self.dtype.itemsize

    @property
    def num_multiplications(self) -> int:
        return math.prod(self.output) * math.prod(self.weight[1:])

    @property
    def result_bytes(self) -> int:
        """The bytes of what is computed."""
        image, weight, output = self.sizes
        return {"forward": output, "image": image, "weight": weight}[self.part]

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not self.channels_last:
            return contiguous_strides(shape)
        batch, channels, *pixels = shape
        inner = contiguous_strides((batch, *pixels, channels))
        return (inner[0], inner[-1], *inner[1:-1])
