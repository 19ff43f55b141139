"""The description of a convolution that torch gives to cuDNN."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

import torch

from ..layout import contiguous_strides

Part = Literal["forward", "image", "weight"]
"""What is computed: the output, the gradient of the image, or the gradient of the weight."""


_GEOMETRY = {"padding": 0, "stride": 1, "dilation": 1}
"""Argument -> its default, which ``Convolution.spelled`` leaves out."""


@dataclass(frozen=True)
class Convolution:
    """A convolution of ``image`` with ``weight`` to ``output``, by shape; cuDNN computes the ``part``.

    All three tensors are dense, in channels last or channels first. The weight has ``channels // groups`` input
    channels, from which cuDNN infers the groups.
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
    def spelled(self) -> str:
        """``forward float32 4,3,224,224 64,3,7,7 padding=3,3 stride=2,2 channels_last``. Defaults are left out."""
        words = [self.part, str(self.dtype).removeprefix("torch."), _listed(self.image), _listed(self.weight)]
        for name, default in _GEOMETRY.items():
            if set(numbers := getattr(self, name)) != {default}:
                words.append(f"{name}={_listed(numbers)}")
        return " ".join([*words, "channels_last"] if self.channels_last else words)

    @staticmethod
    def parsed(spelled: str) -> Convolution:
        """Parse the result of ``spelled``."""
        part, dtype, *words = spelled.split()
        image, weight = map(_numbers, words[:2])
        given = dict(word.partition("=")[::2] for word in words[2:])
        padding, stride, dilation = (
            _numbers(given[name]) if name in given else (default,) * (len(image) - 2)
            for name, default in _GEOMETRY.items()
        )
        pixels = zip(image[2:], weight[2:], padding, stride, dilation, strict=True)
        output = (image[0], weight[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, p, s, d in pixels))
        is_last = "channels_last" in given
        return Convolution(
            cast(Part, part), getattr(torch, dtype), image, weight, output, is_last, padding, stride, dilation
        )

    @property
    def groups(self) -> int:
        return self.image[1] // self.weight[1]

    @property
    def is_depthwise(self) -> bool:
        return self.groups == self.image[1] > 1

    @property
    def is_pointwise(self) -> bool:
        """Whether this is a matrix product: a kernel of one pixel, with stride 1, no padding and no groups."""
        is_plain = set(self.weight[2:]) | set(self.stride) == {1} and not any(self.padding)
        return is_plain and self.groups == 1

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The bytes of the image, the weight and the output."""
        image, weight, output = (math.prod(shape) for shape in (self.image, self.weight, self.output))
        return image * self.dtype.itemsize, weight * self.dtype.itemsize, output * self.dtype.itemsize

    @property
    def num_results(self) -> int:
        return self.result_bytes // self.dtype.itemsize

    @property
    def num_multiplications(self) -> int:
        return math.prod(self.output) * math.prod(self.weight[1:])

    @property
    def result_bytes(self) -> int:
        """The bytes of the part that is computed."""
        image, weight, output = self.sizes
        return {"forward": output, "image": image, "weight": weight}[self.part]

    def strides_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if not self.channels_last:
            return contiguous_strides(shape)
        batch, channels, *pixels = shape
        inner = contiguous_strides((batch, *pixels, channels))
        return (inner[0], inner[-1], *inner[1:-1])


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, numbers))


def _numbers(listed: str) -> tuple[int, ...]:
    return tuple(map(int, listed.split(",")))
