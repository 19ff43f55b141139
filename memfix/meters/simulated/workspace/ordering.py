"""Sorting and selecting: sort, topk, medians, permutations and samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..gpus import GPU
from . import cub
from .layout import contiguous_strides, dense_strides, flattens_without_copy, is_dense, strides_with_last
from .memory_formats import copied_unless_contiguous
from .rules import (
    Call,
    Estimated,
    NoRule,
    Range,
    before_results,
    ceil_div,
    copies_unless_contiguous,
    rule,
    size_of,
    worst_moment,
)
from .scanning import whole_scan_buffers
from .split_reduction import Accumulator, partial_result_buffers

_INDEX_BYTES = 8

# ---------------------------------------------------------------- sorting
_SORTED_IN_SHARED_MEMORY = 4096  # rows of at most this length are sorted in place by one block each
_LONG_ROW = 1_000_000  # a row this long fills the GPU, so rows are sorted one after the other
_SEGMENTED_FROM_ROWS = 128
_PAIR_BYTES = 8  # two int32: the row and the position in it
_MOST_ITEMS_PER_SORT = 2**31 - 1


@rule("sort")
def _sort(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0:
        return []
    results = call["values"] if call.has("values") else None
    result_strides = dense_strides(tensor) if results is None else results.stride()
    return sort_buffers(call.gpu, tensor.shape, tensor.stride(), tensor.element_size(), call["dim"], result_strides)


def sort_buffers(
    gpu: GPU,
    shape: Sequence[int],
    strides: Sequence[int],
    item_bytes: int,
    dim: int,
    result_strides: Sequence[int],
) -> list[int]:
    """The buffers for sorting rows of at least two elements with int64 indices, without the results."""
    num_items, dim = math.prod(shape), dim % len(shape)
    if num_items == 0:
        return []
    length = shape[dim]
    if length <= _SORTED_IN_SHARED_MEMORY:
        return [length * _INDEX_BYTES]  # 0, 1, 2, ..., copied to every row of indices
    copies = []
    sorted_strides = tuple(strides)
    if not is_dense(shape, strides) or strides[dim] != 1:
        sorted_strides = strides_with_last(shape, strides, dim)
        copies = [num_items * item_bytes]
    if tuple(result_strides) != sorted_strides:
        copies += [num_items * item_bytes, num_items * _INDEX_BYTES]
    num_rows = min(num_items, _MOST_ITEMS_PER_SORT) // length
    return copies + _rows_sorted_by_cub(gpu, num_rows, length, item_bytes)


def _rows_sorted_by_cub(gpu: GPU, num_rows: int, length: int, item_bytes: int) -> list[int]:
    if num_rows == 1 or length >= _LONG_ROW:
        return [length * _INDEX_BYTES, cub.radix_sort(gpu, length, item_bytes, _INDEX_BYTES)]
    num_items = num_rows * length
    if num_rows >= _SEGMENTED_FROM_ROWS:
        places = num_items * _INDEX_BYTES
        return [places, cub.segmented_radix_sort(gpu, num_items, item_bytes, _INDEX_BYTES)]
    # a few rows are sorted together, first by value, then by row
    pairs = [num_items * _PAIR_BYTES] * 2
    row_bits = max(1, (num_rows - 1).bit_length())
    return worst_moment(
        [*pairs, num_items * item_bytes, cub.radix_sort(gpu, num_items, item_bytes, _PAIR_BYTES)],
        [*pairs, cub.radix_sort(gpu, num_items, _PAIR_BYTES, 0, row_bits)],
    )


def _sort_flat(gpu: GPU, num_items: int, item_bytes: int) -> list[int]:
    """The buffers for sorting one row of ``num_items``, including the sorted values and indices."""
    results = [num_items * item_bytes, num_items * _INDEX_BYTES]
    return results + sort_buffers(gpu, (num_items,), (1,), item_bytes, 0, (1,))


# ---------------------------------------------------------------- the k largest
_SELECT_THREADS = 256
_SELECT_BLOCKS_PER_MULTIPROCESSOR = 6  # the kernel has 40 registers per thread, of 65,536
_FEWEST_ITEMS, _MOST_ITEMS = 4, 64
_DIGITS = 256
# (most rows, length): with at most this many rows, several blocks share a row of at least this length
_SHARED_FROM = ((20, 20_000), (40, 10_000), (80, 8_000), (199, 5_000), (799, 3_000), (4_000, 800))
_SHARED_FROM_WITH_MORE_ROWS = 400
_UNIQUE_BUFFERS = 2 << 20  # beside what grows with the elements


@rule("topk")
def _topk(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0:
        return []
    selecting = copies_unless_contiguous(tensor) + _selection_buffers(call.gpu, tensor, call["dim"], call["k"])
    sorting = _selected_sort_buffers(call.gpu, tensor, call["dim"], call["k"]) if call["sorted"] else []
    return worst_moment(selecting, sorting)


def _selection_buffers(gpu: GPU, tensor: torch.Tensor, dim: int, k: int) -> list[int]:
    """The buffers for selection by radix if several blocks share a row, such as the digit counts of each block."""
    if tensor.numel() == 0 or k == 0:
        return []
    length, item_bytes = tensor.shape[dim], tensor.element_size()
    num_rows = tensor.numel() // length
    shared_from = next((start for most, start in _SHARED_FROM if num_rows <= most), _SHARED_FROM_WITH_MORE_ROWS)
    if length < shared_from:
        return []
    at_once = gpu.multiprocessors * _SELECT_BLOCKS_PER_MULTIPROCESSOR * _SELECT_THREADS
    items_per_thread = max(_FEWEST_ITEMS, min(ceil_div(tensor.numel(), at_once), _MOST_ITEMS))
    num_blocks = num_rows * ceil_div(length, items_per_thread * _SELECT_THREADS)
    return [
        num_rows * item_bytes,
        2 * num_rows * 4,
        2 * num_rows * max(4, item_bytes),
        num_blocks * _DIGITS * 2,
        num_rows * _DIGITS * 4,
        num_blocks * 4,
        num_blocks * 4,
        cub.scan_by_key(gpu, num_blocks, 4),
    ]


def _selected_sort_buffers(gpu: GPU, tensor: torch.Tensor, dim: int, k: int) -> list[int]:
    """The buffers for sorting the selected elements: none if they are few, else the sorted copy and its indices."""
    if k <= _SORTED_IN_SHARED_MEMORY:
        return []
    dim = dim % tensor.dim()
    shape = (*tensor.shape[:dim], k, *tensor.shape[dim + 1 :])
    strides, item_bytes, num_selected = contiguous_strides(shape), tensor.element_size(), math.prod(shape)
    sorting = sort_buffers(gpu, shape, strides, item_bytes, dim, strides)
    gathering = [num_selected * _INDEX_BYTES]
    return [num_selected * item_bytes, num_selected * _INDEX_BYTES, *worst_moment(sorting, gathering)]


# ---------------------------------------------------------------- order statistics
copied_unless_contiguous("self", "kthvalue")


@rule("median", "nanmedian")
def _median(call: Call) -> list[int]:
    """Along a dimension, rows are searched digit by digit; without one, the whole tensor is sorted first."""
    tensor = call["self"]
    if call.has("dim"):
        return copies_unless_contiguous(tensor)
    if tensor.numel() == 0:
        return []
    if tensor.numel() == 1 and call.operator.overloadpacket is torch.ops.aten.nanmedian:
        raise NoRule("nanmedian of one number")
    flat = [] if flattens_without_copy(tensor) else [size_of(tensor)]
    sorting = flat + _sort_flat(call.gpu, tensor.numel(), tensor.element_size())
    return before_results(sorting, tensor.element_size())


_MODE_IN_SHARED_MEMORY = 2048


@rule("mode")
def _mode(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    dim = call["dim"] % tensor.dim()
    if tensor.shape[dim] == 1:
        return []
    if tensor.shape[dim] > _MODE_IN_SHARED_MEMORY or tensor.numel() >= 2**31:
        raise NoRule(f"mode of rows of {tensor.shape[dim]:,}, whose buffers depend on how many values differ")
    return copies_unless_contiguous(tensor.transpose(dim, -1))


# ---------------------------------------------------------------- searching
@rule("searchsorted", "bucketize")
def _searchsorted(call: Call) -> list[int]:
    boundaries = call["sorted_sequence"] if call.has("sorted_sequence") else call["boundaries"]
    values, sorter = call["self"], call["sorter"] if call.has("sorter") else None
    if not isinstance(values, torch.Tensor):
        raise NoRule("a search for one Python number, which torch first puts on the device")
    if values.numel() == 0:
        return []
    copies = copies_unless_contiguous(boundaries, values, sorter)
    if boundaries.dtype == values.dtype:
        return copies
    if copies:
        raise NoRule(f"a search of strided {values.dtype} among {boundaries.dtype}")
    common = torch.promote_types(boundaries.dtype, values.dtype)
    if values.dim() == 0:
        raise NoRule(f"a search of one {values.dtype} among {boundaries.dtype}")
    return [t.numel() * common.itemsize for t in (boundaries, values) if t.dtype != common]


# ---------------------------------------------------------------- permutations and samples
@rule("randperm")
def _randperm(call: Call) -> list[int]:
    """A range is sorted by random keys, which have just enough bits to be rarely equal."""
    n = call["n"]
    if n == 0:
        return []
    wanted = call["out"].dtype if call.has("out") else call["dtype"]
    dtype = wanted if isinstance(wanted, torch.dtype) else torch.int64
    bits = min(64, math.ceil(math.log2(n - (6.0 * n * n + 1) / (12 * math.log(0.9)))))
    key_bytes = 4 if bits <= 32 else 8
    keys, range_bytes = n * key_bytes, n * dtype.itemsize
    return [range_bytes, keys, keys, cub.radix_sort(call.gpu, n, key_bytes, dtype.itemsize, bits)]


_ENOUGH_COLUMNS = 16  # from this many columns on, checking the weights takes less memory than sampling


_CHECK_BUFFERS = (1, 1)  # two booleans on the GPU: all weights are finite, none is negative


@rule("multinomial")
def _multinomial(call: Call) -> list[int]:
    """Without replacement: topk of weights over random numbers. With replacement: a search in their running sum."""
    weights, num_samples = call["self"], call["num_samples"]
    columns = weights.shape[-1]
    if not weights.is_contiguous():
        raise NoRule("samples from weights that are not contiguous")
    if columns < _ENOUGH_COLUMNS or weights.numel() < 1024:
        raise NoRule(f"samples from {weights.numel()} weights, where the checks of the weights may take the most")
    if call["replacement"] and num_samples > 1:
        num_rows = weights.numel() // columns
        summing = whole_scan_buffers(call.gpu, columns, weights.dtype) if num_rows == 1 else []
        return [size_of(weights)] * 3 + summing
    if num_samples == 1:
        largest = Accumulator(16, (_INDEX_BYTES,), in_result=False)
        buffers = partial_result_buffers(call.gpu, weights, [-1], largest, keepdim=True)
        return [size_of(weights), *_CHECK_BUFFERS, *buffers]
    drawn = weights.numel() // columns * num_samples * weights.element_size()
    selecting = _selection_buffers(call.gpu, weights, -1, num_samples)
    sorting = _selected_sort_buffers(call.gpu, weights, -1, num_samples)
    return [size_of(weights), *_CHECK_BUFFERS, drawn, *worst_moment(selecting, sorting)]


# ---------------------------------------------------------------- distinct values
_UNIQUE_OF_FLAT = ("_unique", "_unique2", "unique_consecutive")


@rule("_unique", "_unique2", "unique_consecutive", "unique_dim", "unique_dim_consecutive")
def _unique(call: Call) -> list[int]:
    """A sorted copy, with indices if the inverse is wanted, and the buffers of the sort. How much of it is alive beside
    the results depends on how many values differ."""
    tensor, name = call["self"], call.operator.overloadpacket.__name__
    why = f"{name}, whose buffers depend on how many values differ"
    copied = 0 if name.endswith("consecutive") else size_of(tensor)
    indices = _INDEX_BYTES * tensor.numel()
    usual = copied + (indices if call["return_inverse"] else 0)
    most = 3 * size_of(tensor) + 7 * indices + _UNIQUE_BUFFERS
    raise Estimated(why, Range(0, usual, most))


def room_for_distinct(call: Call) -> int | None:
    """The elements for which an operator on a flat tensor makes room in each result, before it knows how many values
    differ; None if it makes room for no more than it returns."""
    name = call.operator.overloadpacket.__name__
    is_flat = name in _UNIQUE_OF_FLAT and not (call.has("dim") and call["dim"] is not None)
    return call["self"].numel() if is_flat else None
