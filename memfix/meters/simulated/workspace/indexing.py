"""Reading and writing by index: gathers need no workspace, additions sort their indices first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NoReturn

import torch

from . import cub
from .layout import contiguous_strides, is_contiguous
from .rules import (
    Call,
    Estimated,
    NoRule,
    Range,
    before_results,
    copies_unless_contiguous,
    none_needed,
    rule,
    size_of,
    unknown,
    worst_moment,
)
from .scanning import whole_scan_buffers

none_needed("index_select gather take index_fill index_fill_")
_LONG_BYTES, _COUNT_BYTES = 8, 4


@rule("scatter", "scatter_", "scatter_add", "scatter_add_", "index_add", "index_add_", "index_copy", "index_copy_")
def _write_by_index(call: Call) -> list[int]:
    _refuse_if_deterministic(call)
    return []


# ---------------------------------------------------------------- x[i, j]
@rule("index")
def _index(call: Call) -> list[int]:
    return _index_copies(call["indices"])


@rule("index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put")
def _index_put(call: Call) -> list[int]:
    tensor, indices, values = call["self"], call["indices"], call["values"]
    if call["accumulate"]:
        return _add_by_index(call, tensor, indices, values)
    if is_masked_fill(tensor, indices, values):
        return []
    _refuse_if_deterministic(call)
    return _index_copies(indices) + ([size_of(values)] if _is_from_cpu(values, tensor) else [])


def is_masked_fill(tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor) -> bool:
    """Whether the call fills one mask with a CPU scalar; torch then passes the scalar as a kernel argument."""
    given = [index for index in indices if index is not None]
    return _is_from_cpu(values, tensor) and values.numel() == 1 and len(given) == 1 and is_mask(given[0])


def _index_copies(indices: Sequence[torch.Tensor | None]) -> list[int]:
    """The bytes of index copies: the kernel reads int64, and several indices only if their strides agree."""
    given = [index for index in indices if index is not None]
    _refuse_masks(given)
    if not given:
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    each = math.prod(shape) * _LONG_BYTES
    if any(index.dtype != torch.int64 for index in given):
        if any(index.shape != shape or not index.is_contiguous() for index in given):
            raise NoRule("broadcast or strided indices that are not int64")
        return [each for index in given if index.dtype != torch.int64]
    strides = [_broadcast_strides(index, shape) for index in given]
    if all(stride == strides[0] for stride in strides):
        return []
    return [each for stride in strides if not is_contiguous(shape, stride)]


def _broadcast_strides(index: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    missing = len(shape) - index.dim()
    own = [
        stride if size == wanted else 0
        for size, stride, wanted in zip(index.shape, index.stride(), shape[missing:], strict=True)
    ]
    return (*[0] * missing, *own)


# ---------------------------------------------------------------- x[i, j] += y
def _add_by_index(
    call: Call, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> list[int]:
    """Indices are linearised and sorted. Rows and values that are not contiguous are copied first."""
    given = [index for index in indices if index is not None]
    if len(given) == 1 and is_mask(given[0]) and call.has("unsafe") and call["unsafe"]:
        _add_by_mask(call, tensor, indices, values)
    _refuse_masks(given)
    if not given:
        raise NoRule("an addition by index without an index")
    if sum(index.dtype != torch.int64 for index in given) > 1:
        raise NoRule("an addition by several indices that are not int64")
    num_indices = math.prod(torch.broadcast_shapes(*(index.shape for index in given)))
    indexed = [dim for dim, index in enumerate(indices) if index is not None]
    order = list(range(tensor.dim()))
    if indexed != list(range(indexed[0], indexed[-1] + 1)):
        order = indexed + [dim for dim in order if dim not in indexed]
        indexed = list(range(len(indexed)))
    slice_size = math.prod(tensor.shape[dim] for dim in order[indexed[-1] + 1 :])
    num_before = math.prod(tensor.shape[dim] for dim in order[: indexed[0]])

    copies = copies_unless_contiguous(tensor)
    num_values = num_indices * num_before * slice_size
    if values.numel() < num_values or not values.is_contiguous():
        copies.append(num_values * values.element_size())
    if num_indices == 0 or slice_size == 0:
        return copies
    strides = contiguous_strides(tensor.shape)
    if not is_contiguous([tensor.shape[dim] for dim in order], [strides[dim] for dim in order]):
        copies.append(size_of(tensor))
    bits = max(1, ((tensor.numel() - 1) // slice_size).bit_length())  # bits of the largest sort key
    temporary = cub.radix_sort(call.gpu, num_indices, _LONG_BYTES, _LONG_BYTES, bits)
    return [*copies, *[num_indices * _LONG_BYTES] * 4, temporary]


def _add_by_mask(
    call: Call, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None], values: torch.Tensor
) -> NoReturn:
    """Raise ``Estimated`` for the backward of picking by a mask, which adds by the places of the mask's elements. The
    places are freed before or after the sort that takes most."""
    (dim,) = (dim for dim, index in enumerate(indices) if index is not None)
    mask = indices[dim]
    assert mask is not None
    picked = (*tensor.shape[:dim], values.shape[dim], *tensor.shape[dim + mask.dim() :])
    if values.shape != picked:
        raise NoRule(f"an addition of {list(values.shape)} by a mask")
    each = torch.empty(values.shape[dim], dtype=torch.int64, device="meta")
    size = sum(_add_by_index(call, tensor, [*indices[:dim], *[each] * mask.dim(), *indices[dim + 1 :]], values))
    places = mask.dim() * size_of(each)
    raise Estimated("an addition by a mask: its places may be alive beside it", Range(size, size, size + places))


# ---------------------------------------------------------------- reductions by index
@rule("index_reduce", "index_reduce_")
def _index_reduce(call: Call) -> list[int]:
    tensor, index, source = call["self"], call["index"], call["source"]
    initializing = [] if call["include_self"] or index.dtype == torch.int64 else [index.numel() * _LONG_BYTES]
    if call["reduce"] != "mean":
        return initializing
    _refuse_if_deterministic(call)
    counts = size_of(tensor)
    return worst_moment(initializing, [counts, size_of(source)], [counts, tensor.numel()])


@rule("scatter_reduce", "scatter_reduce_")
def _scatter_reduce(call: Call) -> list[int]:
    tensor, source = call["self"], call["src"]
    _refuse_if_deterministic(call)
    if call["reduce"] != "mean":
        return []
    return [size_of(tensor), size_of(source), tensor.numel()]  # counts, the ones summed for them, a mask of zero counts


# ---------------------------------------------------------------- by mask, by flat index, by count
@rule("masked_scatter_")
def _masked_scatter(call: Call) -> list[int]:
    """The source position of each element is the running sum of the mask."""
    tensor, mask, source = call["self"], call["mask"], call["source"]
    if tensor.numel() == 0:
        return []
    places = [tensor.numel() * _LONG_BYTES]
    if mask.shape != tensor.shape or not mask.is_contiguous():
        places.append(tensor.numel())
    summing = whole_scan_buffers(call.gpu, tensor.numel(), torch.int64)
    return places + worst_moment(summing, copies_unless_contiguous(source))


@rule("put_")
def _put(call: Call) -> list[int]:
    index, source = call["index"], call["source"]
    _refuse_if_deterministic(call)
    if index.shape != source.shape and not index.is_contiguous():
        raise NoRule("put_ with a strided index of another shape than its source")
    return []


@rule("repeat_interleave")
def _repeat_interleave(call: Call) -> list[int]:
    """The repeat counts are turned into end positions by a running sum."""
    repeats = call["repeats"]
    results = call.outputs
    if not isinstance(results, torch.Tensor) or type(results.numel()) is not int:
        raise NoRule("repeat_interleave, whose result depends on the values")
    if repeats.numel() == 0:
        return []
    ends = [*copies_unless_contiguous(repeats), repeats.numel() * _LONG_BYTES]
    cast = [] if repeats.dtype == torch.int64 else [repeats.numel() * _LONG_BYTES]
    if not repeats.is_contiguous():
        raise NoRule("repeat_interleave of strided repeats")
    summing = [*ends, *cast, *whole_scan_buffers(call.gpu, repeats.numel(), torch.int64)]
    return worst_moment(before_results(summing, size_of(results)), ends)


@rule("nonzero")
def _nonzero(call: Call) -> list[int]:
    """The elements are counted, and then their places are selected into the result."""
    tensor = call["self"]
    if tensor.numel() == 0:
        return []
    kept = [*copies_unless_contiguous(tensor), _COUNT_BYTES]
    counting = [*kept, cub.reduce(call.gpu, tensor.numel(), _COUNT_BYTES)]
    selecting = [*kept, cub.select(call.gpu, tensor.numel(), _LONG_BYTES)]
    return worst_moment(before_results(counting, size_of(call.outputs)), selecting)


unknown("{name}, whose buffers depend on the values", "nonzero_static", "masked_select")


@rule("_convert_indices_from_coo_to_csr")
def _starts_of_rows(call: Call) -> list[int]:
    why = f"{call.operator}: assumed to write its result directly, as in its source; it was not measured"
    raise Estimated(why, Range(0, 0, size_of(call["self"])))


# ---------------------------------------------------------------- refusals
def is_mask(index: torch.Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _is_from_cpu(values: torch.Tensor, tensor: torch.Tensor) -> bool:
    return _device_of(values) == "cpu" != _device_of(tensor)


def _refuse_masks(indices: Sequence[torch.Tensor]) -> None:
    if any(map(is_mask, indices)):
        raise NoRule("indexing by a mask, whose buffers depend on the values")


def _refuse_if_deterministic(call: Call) -> None:
    if torch.are_deterministic_algorithms_enabled():
        raise NoRule(f"{call.operator.overloadpacket.__name__} with deterministic algorithms, which is another kernel")


def _device_of(tensor: torch.Tensor) -> str:
    return str((getattr(tensor, "fake_device", None) or tensor.device).type)
