"""The buffers of torch's CUDA reductions: a reduction that is long and has few outputs is split over blocks,
whose partial results meet in memory.

The numbers follow the launch configuration that torch computes for a reduction (ATen's ``Reduce.cuh``).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from .gpus import GPU

_MAX_THREADS = 512
_WARP = 32
_INPUT_VECTOR = 4
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_SEMAPHORE_BYTES = 4


@dataclass(frozen=True)
class _Axis:
    size: int
    in_stride: int
    out_stride: int  # 0 where the axis is reduced

    @property
    def reduced(self) -> bool:
        return self.out_stride == 0


def partial_result_buffers(gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, accumulator_bytes: int) -> list[int]:
    """The transient buffers of reducing ``dims`` of ``tensor`` (None: all), in bytes; [] where one block suffices."""
    if tensor.numel() == 0 or tensor.dim() == 0:
        return []
    reduced = {d % tensor.dim() for d in dims} if dims else set(range(tensor.dim()))
    axes = _iteration_axes(tensor, reduced)
    num_reduced = sum(axis.reduced for axis in axes)
    if num_reduced == 0:
        return []
    num_outputs = math.prod(axis.size for axis in axes if not axis.reduced)
    inputs_per_output = tensor.numel() // num_outputs

    along_fastest = num_reduced == len(axes) or axes[0].in_stride < axes[num_reduced].in_stride
    fastest = axes[0] if along_fastest else axes[num_reduced]
    width, height = (inputs_per_output, num_outputs) if along_fastest else (num_outputs, inputs_per_output)
    output_vector = 1
    if fastest.in_stride == 1:
        if along_fastest and width >= 128 and num_reduced == 1:
            width //= _INPUT_VECTOR
        elif not along_fastest:
            output_vector = _output_vector(tensor, fastest)
            width //= output_vector

    threads = _MAX_THREADS // output_vector
    width_pow2, height_pow2 = (min(_last_power_of_two(n), threads) for n in (width, height))
    block_x = min(width_pow2, _WARP)
    block_y = min(height_pow2, threads // block_x)
    block_x = min(width_pow2, threads // block_y)

    inputs_per_step = block_x if along_fastest else 1
    outputs_per_step = 1 if along_fastest else block_x
    values = _ceil_div(inputs_per_output, inputs_per_step)
    if values < min(block_y * 16, _MAX_VALUES_PER_THREAD):
        return []  # a thread's share is small: warps are not split over one output, and blocks never
    values = _ceil_div(inputs_per_output, inputs_per_step * block_y)
    grid = _ceil_div(num_outputs // output_vector, outputs_per_step)
    target_grid = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (block_x * block_y))
    if values < _MAX_VALUES_PER_THREAD or grid > target_grid:
        return []
    blocks_per_output = max(
        min(_ceil_div(target_grid, grid), _ceil_div(values, _MIN_VALUES_PER_THREAD)),
        _ceil_div(values, _MAX_VALUES_PER_THREAD),
    )
    if blocks_per_output == 1:
        return []
    partial = accumulator_bytes * num_outputs * blocks_per_output
    if not along_fastest:
        partial *= block_x * output_vector
    return [partial, _SEMAPHORE_BYTES * grid]


def needs_64bit_indexing(tensor: torch.Tensor) -> bool:
    """Torch then cuts the reduction in pieces, each with buffers of its own."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.numel() >= 2**31 or extent * tensor.element_size() >= 2**31


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _last_power_of_two(value: int) -> int:
    return 1 << (max(1, value).bit_length() - 1)


def _output_vector(tensor: torch.Tensor, fastest: _Axis) -> int:
    for vector in (4, 2):
        if fastest.size % vector == 0 and tensor.storage_offset() % vector == 0:
            return vector
    return 1


def _iteration_axes(tensor: torch.Tensor, reduced: set[int]) -> list[_Axis]:
    """The axes as TensorIterator walks them: reduced ones first, then by stride, neighbours merged."""
    out_strides, step = [0] * tensor.dim(), 1
    for dim in reversed(range(tensor.dim())):
        if dim not in reduced:
            out_strides[dim] = step
            step *= tensor.shape[dim]
    axes = [_Axis(*axis) for axis in zip(tensor.shape, tensor.stride(), out_strides, strict=True)]
    merged: list[_Axis] = []
    for axis in _insertion_sorted(axes[::-1]):
        before = merged[-1] if merged else None
        if before is None:
            merged.append(axis)
        elif before.size == 1:
            merged[-1] = axis
        elif axis.size == 1:
            continue
        elif (before.size * before.in_stride, before.size * before.out_stride) == (
            axis.in_stride,
            axis.out_stride,
        ):
            merged[-1] = _Axis(before.size * axis.size, before.in_stride, before.out_stride)
        else:
            merged.append(axis)
    return merged


def _insertion_sorted(axes: list[_Axis]) -> list[_Axis]:
    """TensorIterator's order. Its comparison can say 'either way', so the sort itself matters."""
    axes = list(axes)
    for i in range(1, len(axes)):
        moving = i
        for j in range(i - 1, -1, -1):
            order = _compare(axes[j], axes[moving])
            if order > 0:
                axes[j], axes[moving] = axes[moving], axes[j]
                moving = j
            elif order < 0:
                break
    return axes


@functools.cache
def _compare(a: _Axis, b: _Axis) -> int:
    """1 where ``b`` goes before ``a``, -1 where it stays behind, 0 for either way."""
    if a.reduced != b.reduced:
        return 1 if b.reduced else -1
    for stride_a, stride_b in ((a.out_stride, b.out_stride), (a.in_stride, b.in_stride)):
        if stride_a == 0 or stride_b == 0:
            continue
        if stride_a != stride_b:
            return -1 if stride_a < stride_b else 1
        if a.size > b.size:
            return 1
    return 0
