"""The buffers of torch's CUDA reductions: a long reduction with few outputs is split over blocks, which exchange
partial results through memory.

The numbers follow the launch configuration that torch computes for a reduction (ATen's ``Reduce.cuh``). A reduction
too large for 32-bit offsets is halved until its pieces fit; the pieces run one after the other.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ..gpus import GPU
from .rules import ceil_div, last_power_of_two

_MAX_THREADS = 512
_MAX_THREADS_COMPLEX128 = 256
_WARP = 32
# 16-bit sums read eight elements at a time, but that changes no split
_INPUT_VECTOR = 4
_MIN_VALUES_PER_THREAD, _MAX_VALUES_PER_THREAD = 16, 256
_SEMAPHORE_BYTES = 4
_LAST_32BIT_OFFSET = 2**31 - 1


@dataclass(frozen=True)
class Accumulator:
    """The item sizes of a kernel's accumulator and of its results."""

    bytes: int
    result_bytes: tuple[int, ...]
    """The item size of each result; a few kernels write two."""
    in_result: bool
    """Whether the pieces of a halved reduction can keep their running state in the first result."""

    def buffer_between_pieces(self, num_outputs: int) -> list[int]:
        if self.in_result or self.result_bytes[0] >= self.bytes:
            return []
        return [num_outputs * self.bytes]


@dataclass(frozen=True)
class _Axis:
    size: int
    in_stride: int
    out_stride: int  # 0 if the axis is reduced

    @property
    def reduced(self) -> bool:
        return self.out_stride == 0


@dataclass(frozen=True)
class _Piece:
    """The part of the iteration space that one kernel launch reduces."""

    axes: tuple[_Axis, ...]
    offset: int  # storage offset of its first input, in elements

    @property
    def num_outputs(self) -> int:
        return math.prod(axis.size for axis in self.axes if not axis.reduced)

    def narrowed(self, which: int, start: int, size: int) -> _Piece:
        axis = self.axes[which]
        axes = (*self.axes[:which], replace(axis, size=size), *self.axes[which + 1 :])
        return _Piece(axes, self.offset + start * axis.in_stride)


def partial_result_buffers(
    gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, accumulator: Accumulator, *, keepdim: bool = False
) -> list[int]:
    """The transient buffers of reducing ``dims`` of ``tensor`` (None: all), in bytes; [] if one block suffices."""
    if tensor.numel() == 0 or tensor.dim() == 0:
        return []
    reduced = {d % tensor.dim() for d in dims} if dims else set(range(tensor.dim()))
    whole = _Piece(tuple(_iteration_axes(tensor, reduced, keepdim)), int(tensor.storage_offset()))
    item_bytes = (*accumulator.result_bytes, tensor.element_size())
    threads = _MAX_THREADS_COMPLEX128 if tensor.dtype == torch.complex128 else _MAX_THREADS
    if _fits_32bit(whole, item_bytes):
        return _buffers_of_one_kernel(gpu, whole, accumulator.bytes, threads)
    pieces = [_buffers_of_one_kernel(gpu, p, accumulator.bytes, threads) for p in _cut(whole, item_bytes)]
    return [*accumulator.buffer_between_pieces(whole.num_outputs), *max(pieces, key=sum)]


def _buffers_of_one_kernel(gpu: GPU, piece: _Piece, accumulator_bytes: int, max_threads: int) -> list[int]:
    axes = piece.axes
    num_reduced = sum(axis.reduced for axis in axes)
    if num_reduced == 0:
        return []
    num_outputs = piece.num_outputs
    inputs_per_output = math.prod(axis.size for axis in axes) // num_outputs

    along_fastest = num_reduced == len(axes) or axes[0].in_stride < axes[num_reduced].in_stride
    fastest = axes[0] if along_fastest else axes[num_reduced]
    width, height = (inputs_per_output, num_outputs) if along_fastest else (num_outputs, inputs_per_output)
    output_vector = 1
    if fastest.in_stride == 1:
        if along_fastest and width >= 128 and num_reduced == 1:
            width //= _INPUT_VECTOR
        elif not along_fastest:
            output_vector = _output_vector(piece, num_reduced)
            width //= output_vector

    threads = max_threads // output_vector
    width_pow2, height_pow2 = (min(last_power_of_two(n), threads) for n in (width, height))
    block_x = min(width_pow2, _WARP)
    block_y = min(height_pow2, threads // block_x)
    block_x = min(width_pow2, threads // block_y)

    inputs_per_step = block_x if along_fastest else 1
    outputs_per_step = 1 if along_fastest else block_x
    values = ceil_div(inputs_per_output, inputs_per_step)
    if values < min(block_y * 16, _MAX_VALUES_PER_THREAD):
        return []  # each thread has little to reduce, so no output is split over warps or blocks
    values = ceil_div(inputs_per_output, inputs_per_step * block_y)
    grid = ceil_div(num_outputs // output_vector, outputs_per_step)
    target_grid = gpu.multiprocessors * (gpu.threads_per_multiprocessor // (block_x * block_y))
    if values < _MAX_VALUES_PER_THREAD or grid > target_grid:
        return []
    blocks_per_output = max(
        min(ceil_div(target_grid, grid), ceil_div(values, _MIN_VALUES_PER_THREAD)),
        ceil_div(values, _MAX_VALUES_PER_THREAD),
    )
    if blocks_per_output == 1:
        return []
    partial = accumulator_bytes * num_outputs * blocks_per_output
    if not along_fastest:
        partial *= block_x * output_vector
    return [partial, _SEMAPHORE_BYTES * grid]


def _output_vector(piece: _Piece, fastest: int) -> int:
    """The width of vectorised reads of neighbouring outputs: every row must start at a multiple of it."""
    starts = [axis.in_stride for which, axis in enumerate(piece.axes) if which != fastest]
    must_divide = [piece.offset, piece.axes[fastest].size, *starts]
    return next(vector for vector in (4, 2, 1) if all(value % vector == 0 for value in must_divide))


# ---------------------------------------------------------------- pieces with 32-bit offsets
def _fits_32bit(piece: _Piece, item_bytes: tuple[int, ...]) -> bool:
    if math.prod(axis.size for axis in piece.axes) > _LAST_32BIT_OFFSET:
        return False
    *result_bytes, input_bytes = item_bytes
    out_extent = sum((axis.size - 1) * axis.out_stride for axis in piece.axes)
    in_extent = sum((axis.size - 1) * axis.in_stride for axis in piece.axes)
    return 1 + max(out_extent * max(result_bytes), in_extent * input_bytes) <= _LAST_32BIT_OFFSET


def _cut(whole: _Piece, item_bytes: tuple[int, ...]) -> Iterator[_Piece]:
    """Halve the axis with the largest extent in memory until all offsets fit."""
    waiting = [whole]
    while waiting:
        piece = waiting.pop()
        if _fits_32bit(piece, item_bytes):
            yield piece
            continue
        which = max(reversed(range(len(piece.axes))), key=lambda i: _reach(piece.axes[i], item_bytes))
        size = piece.axes[which].size
        waiting += [piece.narrowed(which, 0, size // 2), piece.narrowed(which, size // 2, size - size // 2)]


def _reach(axis: _Axis, item_bytes: tuple[int, ...]) -> int:
    *result_bytes, input_bytes = item_bytes
    return (axis.size - 1) * max(axis.out_stride * max(result_bytes), axis.in_stride * input_bytes)


# ---------------------------------------------------------------- the order of iteration
def _iteration_axes(tensor: torch.Tensor, reduced: set[int], keepdim: bool) -> list[_Axis]:
    """The axes as TensorIterator walks them: reduced ones first, then by stride, neighbours merged."""
    out_strides, step = [0] * tensor.dim(), 1
    for dim in reversed(range(tensor.dim())):
        if dim not in reduced:
            out_strides[dim] = step
            step *= tensor.shape[dim]
        elif keepdim and tensor.shape[dim] == 1:
            out_strides[dim] = step
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
    """Sort as TensorIterator does. Its comparison is not a total order, so the algorithm matters."""
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
    """1 if ``b`` must come before ``a``, -1 if after, 0 if undecided."""
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
