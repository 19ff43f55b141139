"""Operators on lists of tensors, and the fused optimizers.

One kernel handles a list of similar tensors (one dtype, dense, the same strides across lists), with all metadata in
its arguments. Any other list is processed tensor by tensor. In both cases elementwise operators write their results
directly; only reductions differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .creating import cast_by_numbers
from .layout import is_dense
from .moving import cross_device_copy_buffers
from .reducing import extremum_buffers, norm_buffers
from .rules import Call, NoRule, ceil_div, none_needed, rule, size_of

none_needed(
    """_fused_adam_ _fused_adamw_ _fused_sgd_ _fused_adagrad_ _amp_foreach_non_finite_check_and_unscale_
    _amp_update_scale_ _foreach_clone _foreach_copy _foreach_zero_"""
)
_BOTH_WAYS = """abs acos add addcdiv addcmul asin atan ceil cos cosh div erf erfc exp expm1 floor
    frac lerp lgamma log log10 log1p log2 mul neg reciprocal round rsqrt sigmoid sign sin sinh
    sqrt sub tan tanh trunc"""
none_needed(" ".join(f"_foreach_{name} _foreach_{name}_" for name in _BOTH_WAYS.split()))
_CASTING = "clamp_max clamp_min maximum minimum pow".split()
none_needed(" ".join(f"_foreach_{name}_" for name in _CASTING))

_CHUNK = 65_536  # elements that one block reduces


@rule("_foreach_abs")
def _abs(call: Call) -> list[int]:
    if any(tensor.is_complex() for tensor in call["self"]):
        raise NoRule(f"{call.operator} of complex numbers")
    return []


@rule(*(f"_foreach_{name}" for name in _CASTING))
def _by_numbers(call: Call) -> list[int]:
    """Integers with a float go tensor by tensor, and each is first cast to the dtype of its result."""
    overload = call.operator._overloadname
    if not overload.startswith("Scalar") or overload == "ScalarAndTensor":
        return []
    tensors = call["self"]
    numbers = next(call[name] for name in ("scalars", "scalar", "exponent") if call.has(name))
    each = numbers if isinstance(numbers, (list, tuple)) else [numbers] * len(tensors)
    of = {id(tensor): cast_by_numbers(tensor, number) for tensor, number in zip(tensors, each, strict=True)}
    if not any(of.values()):
        return []
    results = [sum(of[id(tensor)]) or size_of(tensor) for tensor in tensors]
    return _one_by_one(tensors, results, lambda tensor: of[id(tensor)])


@rule("_foreach_copy_")
def _copy(call: Call) -> list[int]:
    pairs = zip(call["self"], call["src"], strict=True)
    return max((cross_device_copy_buffers(to, source, call["non_blocking"]) for to, source in pairs), key=sum)


@rule("_foreach_norm", "_foreach_powsum")
def _norm(call: Call) -> list[int]:
    """Every tensor gets a partial result for each chunk of the longest tensor."""
    tensors, order, dtype = call["self"], float(call["ord"]), call["dtype"]
    is_power_sum = call.operator.overloadpacket.__name__ == "_foreach_powsum"
    by_one_kernel = (1.0, 2.0) if is_power_sum else (1.0, 2.0, float("inf"))
    if not _alike(tensors) or not tensors[0].is_floating_point() or order not in by_one_kernel:
        if is_power_sum:
            raise NoRule(f"{call.operator}, tensor by tensor")
        results = [(dtype or tensor.dtype).to_real().itemsize for tensor in tensors]
        return _one_by_one(tensors, results, lambda t: norm_buffers(call.gpu, t, order, None, dtype))
    result = (dtype or tensors[0].dtype).itemsize
    replaced = sum(result for tensor in tensors if tensor.numel() == 0)  # results of empty tensors are allocated again
    return [_chunk_buffer(tensors, max(4, result)), replaced]


@rule("_foreach_max")
def _max(call: Call) -> list[int]:
    tensors = call["self"]
    item = tensors[0].element_size()
    if not _alike(tensors):
        results = [tensor.element_size() for tensor in tensors]
        return _one_by_one(tensors, results, lambda t: extremum_buffers(call.gpu, t))
    return [_chunk_buffer(tensors, item)]


def _chunk_buffer(tensors: list[torch.Tensor], item: int) -> int:
    return len(tensors) * max(ceil_div(tensor.numel(), _CHUNK) for tensor in tensors) * item


def _alike(tensors: list[torch.Tensor]) -> bool:
    return all(tensor.dtype == tensors[0].dtype and is_dense(tensor.shape, tensor.stride()) for tensor in tensors)


def _one_by_one(
    tensors: list[torch.Tensor], results: list[int], buffers: Callable[[torch.Tensor], list[int]]
) -> list[int]:
    """The peak of the workspaces beyond all results, if tensors are reduced one by one and each makes its result."""
    still_to_come, worst = sum(results), 0
    for tensor, result_bytes in zip(tensors, results, strict=True):
        still_to_come -= result_bytes
        worst = max(worst, sum(buffers(tensor)) - still_to_come)
    return [worst]
