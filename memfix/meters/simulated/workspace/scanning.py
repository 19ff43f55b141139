"""Running sums, products and extrema, and counting into bins."""

from __future__ import annotations

import torch

from ..gpus import GPU
from . import cub
from .layout import dense_strides, is_contiguous
from .reducing import extremum_buffers
from .rules import Call, Estimated, NoRule, Range, before_results, copies_unless_contiguous, rule, size_of

_BLOCKS_WITH_BINS = 16
_MOST_ITEMS_PER_SCAN = 2**30


@rule("cumsum", "cumprod", "cumsum_", "cumprod_")
def _cumulate(call: Call) -> list[int]:
    """Torch's own kernel scans rows; CUB scans a tensor that is a single row."""
    tensor, wanted = call["self"], call["dtype"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    in_place = call.operator.overloadpacket.__name__.endswith("_")
    if call.has("out"):
        dtype = call["out"].dtype
    elif in_place:
        dtype = tensor.dtype
    else:
        dtype = wanted or (tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64)
    size = tensor.numel() * dtype.itemsize
    copies = []
    strides = tuple(tensor.stride())
    if dtype != tensor.dtype:
        copies, strides = [size], dense_strides(tensor)
    if not is_contiguous(tensor.shape, strides):
        copies += [size] * (2 if in_place else 1)  # an in-place scan also makes a contiguous result first
    return copies + _scan_of_one_row(call.gpu, tensor, call["dim"], dtype)


@rule("logcumsumexp", "_logcumsumexp")
def _logcumsumexp(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    return copies_unless_contiguous(tensor) + _scan_of_one_row(call.gpu, tensor, call["dim"], tensor.dtype)


@rule("cummax", "cummin", "_cummax_helper", "_cummin_helper")
def _cumulative_extremum(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.dim() == 0 or tensor.numel() == 0:
        return []
    results = (call["values"], call["indices"]) if call.has("values") else ()
    return copies_unless_contiguous(tensor, *results)


def _scan_of_one_row(gpu: GPU, tensor: torch.Tensor, dim: int, dtype: torch.dtype) -> list[int]:
    if tensor.numel() != tensor.shape[dim]:
        return []
    return whole_scan_buffers(gpu, tensor.numel(), dtype)


def whole_scan_buffers(gpu: GPU, num_items: int, dtype: torch.dtype) -> list[int]:
    """The buffers for scanning a tensor that is a single row."""
    if num_items > _MOST_ITEMS_PER_SCAN:
        raise NoRule(f"a scan over {num_items:,} elements, which torch cuts in pieces")
    if torch.are_deterministic_algorithms_enabled() and (dtype.is_floating_point or dtype.is_complex):
        raise NoRule("a scan of one row with deterministic algorithms, which is another kernel")
    native = not dtype.is_complex and dtype not in (torch.float16, torch.bfloat16)
    return [cub.scan(gpu, num_items, dtype.itemsize, native_type=native)]


@rule("histc", "bincount")
def _histogram(call: Call) -> list[int]:
    """The extrema are found before the bins are allocated. Weights that are no floats are cast."""
    if call.has("min") and call["min"] < call["max"]:  # the bins are in shared memory or in the result
        return []
    tensor, name = call["self"], call.operator.overloadpacket.__name__
    weights = call["weights"] if call.has("weights") else None
    bins = size_of(call.outputs)
    extrema = [2 * tensor.element_size(), *extremum_buffers(call.gpu, tensor)] if tensor.numel() else []
    cast = 8 * weights.numel() if weights is not None and not weights.is_floating_point() else 0
    usual = max(cast, *before_results(extrema, bins))
    # in global memory each block may have bins of its own
    most = usual + sum(extrema) + 8 * tensor.numel() + _BLOCKS_WITH_BINS * bins
    raise Estimated(f"{name}, whose bins depend on the values", Range(0, usual, most))
