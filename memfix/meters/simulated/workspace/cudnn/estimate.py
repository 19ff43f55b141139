"""Estimate cuDNN's workspace by the shapes alone, if the library is not installed or its answer does not suffice.

The estimate was fitted to 11,500 choices of cuDNN 9.19 for an sm_90 GPU and to 10,671 measurements on an H200. The fast
kernels need channels last and channels in multiples of 16 bytes. The library copies other tensors into that layout,
which makes up most of the workspace.
"""

from __future__ import annotations

import math

from .....units import MiB
from ...gpus import H200
from ..rules import Range, round_up
from .convolution import Convolution

_VECTOR_BYTES = 16
_MOST_COUNTER_BYTES = 65_536  # of counters and offsets
# the usual kernel copies nothing, or not the output, below these numbers
_COPIED_FROM_MULTIPLICATIONS = 2**27  # in float32
_COPIED_FROM_CHANNELS, _OUTPUT_COPIED_FROM_CHANNELS = 64, 128  # in float32
_COPIED_FROM_PIXELS = 187  # output pixels in all images, for the image gradient in float32
_COPIED_ABOVE_KERNEL_PIXELS = 25  # in a forward with odd channels in half precision

_TILE = 128 * 128  # results in the usual tile
_BYTES_AFTER_COPIES = 16
COUNTERS_BYTES = 131
"""Bytes of the counters by which multiprocessors take turns to add to one sum."""

_MOST_COPIES_OF_GROUPS, _MOST_COPIES_OF_CHANNELS = 9, 3
"""The most copies of the three tensors that were seen with groups, which are padded, and in depthwise convolutions."""
_MOST_PARTIAL_SUMS = {"forward": (2, 24 * MiB), "image": (2, 24 * MiB), "weight": (5, 64 * MiB)}
"""Part -> the most bytes beyond one copy of the three tensors without groups, as a multiple of the copy and in all."""
_MOST_PARTIAL_PRODUCTS = 16
"""The most parts into which cuBLAS split the sum of a matrix product; each takes the result's size in float32."""


def estimated(convolution: Convolution) -> Range:
    """The estimated workspace: at least none, usually that of the usual kernel, at most that of the greediest one."""
    sizes = _Sizes(convolution)
    if convolution.is_depthwise:
        most = _MOST_COPIES_OF_CHANNELS * sizes.total
    elif convolution.groups > 1:
        most = _MOST_COPIES_OF_GROUPS * sizes.total
    else:
        times, limit = _MOST_PARTIAL_SUMS[convolution.part]
        most = sizes.total + min(times * sizes.total, limit)
    if convolution.part == "weight":
        most += 2 * sizes.weight_sum
    if convolution.is_pointwise:
        most = max(most, _MOST_PARTIAL_PRODUCTS * convolution.num_results * 4, _products_of_images(convolution))
    return Range(0, min(_usual(convolution, sizes), most), most + _MOST_COUNTER_BYTES)


class _Sizes:
    """Bytes of the three tensors, with the channels of each group padded to whole vectors."""

    def __init__(self, convolution: Convolution) -> None:
        item = convolution.dtype.itemsize
        inner, outer = convolution.weight[1], convolution.weight[0] // convolution.groups
        full_in, full_out = (round_up(channels, max(1, _VECTOR_BYTES // item)) for channels in (inner, outer))
        image, weight, output = convolution.sizes
        self.image, self.output = image // inner * full_in, output // outer * full_out
        self.weight = weight // (inner * outer) * full_in * full_out
        self.total = self.image + self.weight + self.output
        # a weight of one pixel is the same in both layouts
        self.copies = self.total if math.prod(convolution.weight[2:]) > 1 else self.image + self.output
        self.weight_sum = self.weight // item * max(4, item)  # its gradient, in the dtype in which it is summed
        self.fills_image, self.fills_output = full_in != inner, full_out != outer


def _usual(convolution: Convolution, sizes: _Sizes) -> int:
    if convolution.is_pointwise:
        return _usual_of_matrix_product(convolution)
    if convolution.is_depthwise:
        is_half = convolution.dtype.itemsize == 2
        is_summed = convolution.part == "weight" and is_half and convolution.channels_last
        return _sums_by_channel(convolution) if is_summed else 0
    copied = _copied(convolution, sizes)
    return copied + _BYTES_AFTER_COPIES * (copied > 0) + COUNTERS_BYTES * _has_counters(convolution)


def _copied(convolution: Convolution, sizes: _Sizes) -> int:
    """The bytes of the copies in channels last that the usual kernel works on."""
    if convolution.groups > 1:
        return 0 if convolution.channels_last else sizes.copies
    if sizes.fills_image or sizes.fills_output:
        return _copied_of_odd_channels(convolution, sizes)
    if convolution.channels_last:
        return 0
    if convolution.dtype.itemsize == 2 or convolution.part == "weight":
        return sizes.copies
    channels, pixels = convolution.image[1], math.prod(convolution.output) // convolution.output[1]
    if convolution.num_multiplications < _COPIED_FROM_MULTIPLICATIONS or channels < _COPIED_FROM_CHANNELS:
        return 0
    if convolution.part == "image":
        return 0 if pixels < _COPIED_FROM_PIXELS else sizes.copies
    return sizes.image + sizes.weight if channels < _OUTPUT_COPIED_FROM_CHANNELS else sizes.copies


def _has_counters(convolution: Convolution) -> bool:
    """Whether the usual kernel has counters, because several multiprocessors add to one sum."""
    if convolution.part == "weight" or convolution.groups > 1:
        return False
    is_float32_in_last = convolution.dtype.itemsize == 4 and convolution.channels_last
    return has_many_tiles(convolution) or (convolution.part == "image" and is_float32_in_last)


def has_many_tiles(convolution: Convolution) -> bool:
    """Whether there are more tiles than a wave and a half of an H200's multiprocessors."""
    return convolution.num_results > 1.5 * H200.multiprocessors * _TILE


def _usual_of_matrix_product(convolution: Convolution) -> int:
    """The workspace of cuBLAS. In channels first, a weight gradient is one product per image; these are then summed."""
    is_one_product = convolution.channels_last or math.prod(convolution.image[2:]) == 1
    return 0 if convolution.part != "weight" or is_one_product else _products_of_images(convolution)


def _products_of_images(convolution: Convolution) -> int:
    """The bytes of one weight gradient per image, in float32."""
    return convolution.image[0] * math.prod(convolution.weight) * 4


def _sums_by_channel(convolution: Convolution) -> int:
    """The buffer of cuDNN's depthwise kernel: eight float32 sums for each image, padded channel and kernel pixel."""
    batch, channels = convolution.image[:2]
    return 8 * batch * round_up(channels, 32) * math.prod(convolution.weight[2:]) * 4


def _copied_of_odd_channels(convolution: Convolution, sizes: _Sizes) -> int:
    is_half, kernel_pixels = convolution.dtype.itemsize == 2, math.prod(convolution.weight[2:])
    if convolution.part == "forward" and (not is_half or kernel_pixels <= _COPIED_ABOVE_KERNEL_PIXELS):
        return 0
    if convolution.channels_last:
        return sizes.image * sizes.fills_image + sizes.output * sizes.fills_output + sizes.weight
    return sizes.copies if is_half or convolution.part == "weight" else 0
