"""Reductions: casts and masks made beforehand, and partial results if a reduction is split over blocks."""

from __future__ import annotations

import math
from typing import Any

import torch

from ..gpus import GPU
from .layout import merges_into_one
from .rules import Call, NoRule, copies_unless_contiguous, none_needed, rule, size_of
from .split_reduction import Accumulator, partial_result_buffers

none_needed("linalg_cross")

_LOW = (torch.float16, torch.bfloat16)
_VALUE_AND_INDEX = 16  # a value of up to eight bytes and an int64


# ---------------------------------------------------------------- sums
@rule("sum", "mean")
def _sum(call: Call) -> list[int]:
    return sum_buffers(call.gpu, call["self"], _dims_of(call), _dtype_of(call), keepdim=_keepdim_of(call))


@rule("nansum")
def _nansum(call: Call) -> list[int]:
    tensor = call["self"]
    jitted = tensor.is_complex()  # run-time compiled kernels keep the partial sums of pieces in the result
    keepdim = _keepdim_of(call)
    return sum_buffers(call.gpu, tensor, _dims_of(call), _dtype_of(call), keepdim=keepdim, jitted=jitted)


@rule("prod")
def _prod(call: Call) -> list[int]:
    keepdim = _keepdim_of(call)
    return sum_buffers(call.gpu, call["self"], _dims_of(call), _dtype_of(call), keepdim=keepdim, jitted=True)


def sum_buffers(
    gpu: GPU,
    tensor: torch.Tensor,
    dims: list[int] | None,
    dtype: torch.dtype | None = None,
    *,
    keepdim: bool = False,
    jitted: bool = False,
) -> list[int]:
    """The buffers of a sum or a product. Integers and masks are first cast to int64."""
    result = dtype or (tensor.dtype if tensor.is_floating_point() or tensor.is_complex() else torch.int64)
    cast, summed = _cast_before(tensor, result)
    if summed.dtype == torch.complex32:
        jitted = True
    in_result = jitted or not (summed.dtype == result and summed.dtype in _LOW)
    accumulator = Accumulator(_summed_in(summed.dtype), (result.itemsize,), in_result)
    return [*cast, *partial_result_buffers(gpu, summed, dims, accumulator, keepdim=keepdim)]


@rule("trace")
def _trace(call: Call) -> list[int]:
    return sum_buffers(call.gpu, call["self"].diagonal(), None)


@rule("count_nonzero")
def _count_nonzero(call: Call) -> list[int]:
    """A mask is made, then cast to int64 and summed."""
    tensor = call["self"]
    mask = tensor if tensor.dtype == torch.bool else _like(tensor, torch.bool)
    mask_bytes = [] if mask is tensor else [size_of(mask)]
    return [*mask_bytes, *sum_buffers(call.gpu, mask, _dims_of(call))]


# ---------------------------------------------------------------- norms
@rule("linalg_vector_norm", "norm")
def _norm(call: Call) -> list[int]:
    order = call["ord"] if call.has("ord") else call["p"]
    dtype = call["dtype"] if call.has("dtype") else None
    return norm_buffers(call.gpu, call["self"], order, _dims_of(call), dtype, keepdim=_keepdim_of(call))


def norm_buffers(
    gpu: GPU,
    tensor: torch.Tensor,
    order: Any,
    dims: list[int] | None,
    dtype: torch.dtype | None,
    *,
    keepdim: bool = False,
) -> list[int]:
    if tensor.numel() == 0:
        return []
    if _nothing_to_reduce(tensor, dims):
        # the result is the absolute value, which for complex input is first made as complex numbers
        typed = _like(tensor, dtype or tensor.dtype)
        cast = [] if typed.dtype == tensor.dtype else [size_of(typed)]
        return [*cast, size_of(typed)] if typed.is_complex() and order != 0 else cast
    return _power_sum_buffers(gpu, tensor, dims, dtype, keepdim)


@rule("linalg__powsum")
def _power_sum(call: Call) -> list[int]:
    tensor, dtype, dims = call["self"], call["dtype"], _dims_of(call)
    if _nothing_to_reduce(tensor, dims) and dtype not in (None, tensor.dtype):
        return [size_of(_like(tensor, dtype))]
    return _power_sum_buffers(call.gpu, tensor, dims, dtype, _keepdim_of(call))


def _power_sum_buffers(
    gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, dtype: torch.dtype | None, keepdim: bool
) -> list[int]:
    if torch.complex32 in (tensor.dtype, dtype):
        raise NoRule("a norm of complex32")
    result = (dtype or tensor.dtype).to_real()
    cast, summed = _cast_before(tensor, result.to_complex() if tensor.is_complex() else result)
    in_result = not (summed.dtype == result and result in _LOW)
    accumulator = Accumulator(max(4, result.itemsize), (result.itemsize,), in_result)
    return [*cast, *partial_result_buffers(gpu, summed, dims, accumulator, keepdim=keepdim)]


@rule("renorm", "renorm_")
def _renorm(call: Call) -> list[int]:
    """The kernel makes the norm of each slice, then a scale factor, which is a second tensor only in half precision."""
    tensor, kept = call["self"], call["dim"] % call["self"].dim()
    if tensor.is_complex():
        raise NoRule("renorm of complex numbers")
    low = tensor.dtype in _LOW
    others = [d for d in range(tensor.dim()) if d != kept]
    norm = tensor.shape[kept] * (4 if low else tensor.element_size())
    factor = tensor.shape[kept] * tensor.element_size() if low else 0
    norm_dtype = torch.float32 if low else None
    while_reducing = norm_buffers(call.gpu, tensor, call["p"], others, norm_dtype, keepdim=True)
    return [norm, *(while_reducing if sum(while_reducing) > factor else [factor])]


# ---------------------------------------------------------------- moments
@rule("var", "std", "var_mean", "std_mean")
def _moments(call: Call) -> list[int]:
    """The state is a running mean, a squared distance and two counts; complex parts are reduced one after the other."""
    tensor, dims, keepdim = call["self"], _dims_of(call), _keepdim_of(call)
    with_mean = call.operator.overloadpacket.__name__.endswith("_mean")
    if call.has("out") and call["out"].dtype != tensor.dtype:
        raise NoRule(f"{call.operator} of {tensor.dtype} into {call['out'].dtype}")
    if not tensor.is_complex():
        return _moment_buffers(call.gpu, tensor, dims, keepdim, with_mean)
    if tensor.dtype == torch.complex32:
        raise NoRule(f"{call.operator} of complex32")
    part = torch.view_as_real(tensor).select(-1, 0)
    reduced = {d % part.dim() for d in dims} if dims else set(range(part.dim()))
    one_result = part.element_size() * math.prod(s for d, s in enumerate(part.shape) if d not in reduced)
    parts = [one_result] * (4 if with_mean else 2)
    results = one_result * (3 if with_mean else 1)  # not yet allocated while the parts are reduced
    reducing = _moment_buffers(call.gpu, part, dims, keepdim, with_mean)
    return [*parts, max(0, sum(reducing) - results)]


def _moment_buffers(
    gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, keepdim: bool, with_mean: bool
) -> list[int]:
    item = tensor.element_size()
    accumulator = Accumulator(32 if item == 8 else 16, (item, item) if with_mean else (item,), in_result=False)
    return partial_result_buffers(gpu, tensor, dims, accumulator, keepdim=keepdim)


# ---------------------------------------------------------------- extrema
@rule("amax", "amin", "max", "min")
def _extremum(call: Call) -> list[int]:
    tensor = call["self"]
    if call.has("other"):
        return []  # the elementwise overload for two tensors
    item, overload = tensor.element_size(), call.operator._overloadname
    if overload.startswith("dim"):  # also returns the index
        with_index = Accumulator(_VALUE_AND_INDEX, (item, 8), in_result=False)
        return partial_result_buffers(call.gpu, tensor, _dims_of(call), with_index, keepdim=_keepdim_of(call))
    if call.has("dim"):
        value = Accumulator(item, (item,), in_result=True)
        return partial_result_buffers(call.gpu, tensor, _dims_of(call), value, keepdim=_keepdim_of(call))
    return extremum_buffers(call.gpu, tensor)


def extremum_buffers(gpu: GPU, tensor: torch.Tensor) -> list[int]:
    """The buffers for finding the largest or the smallest of all elements."""
    value = Accumulator(tensor.element_size(), (tensor.element_size(),), in_result=True)
    return [*copies_unless_contiguous(tensor), *partial_result_buffers(gpu, _contiguous(tensor), None, value)]


@rule("aminmax", "_aminmax")
def _both_extrema(call: Call) -> list[int]:
    tensor, dims = call["self"], _dims_of(call)
    item = tensor.element_size()
    pair = Accumulator(2 * item, (item, item), in_result=False)
    if dims is not None:
        return partial_result_buffers(call.gpu, tensor, dims, pair, keepdim=_keepdim_of(call))
    return [*copies_unless_contiguous(tensor), *partial_result_buffers(call.gpu, _contiguous(tensor), None, pair)]


@rule("argmax", "argmin")
def _index_of_extremum(call: Call) -> list[int]:
    tensor, dim = call["self"], call["dim"]
    with_index = Accumulator(_VALUE_AND_INDEX, (8,), in_result=False)
    if dim is None:
        copy, flat = _flattened(tensor)
        return [*copy, *partial_result_buffers(call.gpu, flat, None, with_index)]
    if tensor.dim() and tensor.shape[dim] == 1:
        return []
    return partial_result_buffers(call.gpu, tensor, [dim], with_index, keepdim=_keepdim_of(call))


# ---------------------------------------------------------------- any, all and equality
@rule("any", "all")
def _truth(call: Call) -> list[int]:
    return _truth_buffers(call.gpu, call["self"], _dims_of(call), _keepdim_of(call))


def _truth_buffers(gpu: GPU, tensor: torch.Tensor, dims: list[int] | None, keepdim: bool = False) -> list[int]:
    if tensor.numel() == 1:
        return [] if tensor.dtype == torch.bool else [1]
    accumulator = Accumulator(tensor.element_size(), (1,), in_result=True)
    return partial_result_buffers(gpu, tensor, dims, accumulator, keepdim=keepdim)


@rule("equal")
def _equal(call: Call) -> list[int]:
    """The kernel makes a mask of equal elements, then reduces it."""
    left, right = call["self"], call["other"]
    if left.shape != right.shape or left.numel() == 0:
        return []
    if left.untyped_storage()._cdata == right.untyped_storage()._cdata:
        raise NoRule("equal of two views of one tensor")
    mask = _like(left, torch.bool)
    return [size_of(mask), 1, *_truth_buffers(call.gpu, mask, None)]


@rule("isin")
def _isin(call: Call) -> list[int]:
    """A mask of all pairs is reduced, and the result is copied. Many test elements are sorted instead."""
    if not (call.has("elements") and call.has("test_elements")):
        raise NoRule(f"{call.operator}, one side of which is a number")
    elements, tests = call["elements"], call["test_elements"]
    if elements.numel() == 0 or tests.numel() == 0:
        return []
    if tests.numel() >= int(10 * elements.numel() ** 0.145):
        raise NoRule(f"isin of {tests.numel()} test elements, which are sorted")
    pairs = torch.empty(*elements.shape, tests.numel(), dtype=torch.bool, device="meta")
    return [size_of(pairs), elements.numel(), *_truth_buffers(call.gpu, pairs, [-1])]


@rule("hash_tensor")
def _hash(call: Call) -> list[int]:
    tensor = call["self"]
    accumulator = Accumulator(1 if tensor.dtype == torch.bool else 8, (8,), in_result=True)
    return partial_result_buffers(call.gpu, tensor, _dims_of(call), accumulator, keepdim=_keepdim_of(call))


# ---------------------------------------------------------------- shared by the rules above
def _dims_of(call: Call) -> list[int] | None:
    given: Any = call["dim"] if call.has("dim") and call["self"].dim() else None  # a number has no dims
    if type(given) is int:
        return [given]
    return list(given) if isinstance(given, (list, tuple)) and given else None


def _dtype_of(call: Call) -> torch.dtype | None:
    """The dtype in which to sum: the one that was asked for, else that of the tensor to write into."""
    dtype: torch.dtype | None = call["dtype"]
    return call["out"].dtype if dtype is None and call.has("out") else dtype


def _keepdim_of(call: Call) -> bool:
    return bool(call["keepdim"]) if call.has("keepdim") else False


def _nothing_to_reduce(tensor: torch.Tensor, dims: list[int] | None) -> bool:
    return all(tensor.shape[dim] == 1 for dim in dims or range(tensor.dim()))


def _summed_in(dtype: torch.dtype) -> int:
    return 4 if dtype in _LOW else 8 if dtype == torch.complex32 else dtype.itemsize


def _cast_before(tensor: torch.Tensor, result: torch.dtype) -> tuple[list[int], torch.Tensor]:
    """The bytes of the cast to the result's dtype, and the tensor after it. Half precision to float32 needs no cast."""
    if tensor.dtype == result or (tensor.dtype in _LOW and result == torch.float32):
        return [], tensor
    cast = _like(tensor, result)
    return [size_of(cast)], cast


def _like(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(tensor, dtype=dtype, device="meta")


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_contiguous() else torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _flattened(tensor: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """The tensor with a single axis, and the bytes of a copy if the strides do not allow a view."""
    if merges_into_one(tensor.shape, tensor.stride()):
        steps = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]
        return [], tensor.as_strided((tensor.numel(),), (steps[-1] if steps else 1,))
    return [size_of(tensor)], torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
