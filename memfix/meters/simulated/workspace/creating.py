"""Operators that create, fill, join or select, and activations: most of their kernels write the result directly."""

from __future__ import annotations

import functools
from typing import Any

import torch

from .memory_formats import contiguous_only
from .rules import Call, copies_unless_contiguous, no_kernel, none_needed, rule, size_of, storage

no_kernel("is_set_to item _efficientzerotensor detach detach_ lift_fresh is_pinned set_ _reshape_alias _unsafe_view")
none_needed(
    """fake_quantize_per_tensor_affine_cachemask fake_quantize_per_channel_affine_cachemask
    _fake_quantize_per_tensor_affine_cachemask_tensor_qparams channel_shuffle
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided zeros zeros_like new_zeros ones
    ones_like new_ones full full_like new_full scalar_tensor arange range linspace logspace eye tril_indices
    triu_indices fill_ zero_ rand rand_like randn randn_like randint randint_like clone cat stack
    triu tril triu_ tril_ resize_ resize_as_ native_dropout native_dropout_backward
    repeat constant_pad_nd flip _local_scalar_dense masked_fill masked_fill_
    complex polar _conj_physical transpose_ t_ squeeze_ unsqueeze_ swapaxes_ swapdims_ as_strided_"""
)
none_needed("_prelu_kernel _prelu_kernel_backward glu glu_backward log_sigmoid_forward log_sigmoid_backward")
contiguous_only("self noise", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")

# pointwise operators that torch does not tag as such
none_needed(
    """__irshift__ __ilshift__ abs_ copysign_ floor_divide floor_divide_ gcd_ ge_ gt_ heaviside_ lcm_ le_ lt_ ne_ rsub
    xlogy_ gelu_ hardswish hardswish_ mish_ threshold_ elu_backward hardshrink_backward hardsigmoid_backward
    hardswish_backward hardtanh_backward leaky_relu leaky_relu_ leaky_relu_backward mish_backward softplus_backward
    softshrink_backward record_stream"""
)


@rule("roll")
def _roll(call: Call) -> list[int]:
    """Axes are rolled one after the other, and each intermediate result is kept until the end."""
    tensor, num_axes = call["self"], len(call["dims"])
    kept = [size_of(tensor)] * max(0, num_axes - 1)
    return kept or copies_unless_contiguous(tensor)


@rule("where")
def _where(call: Call) -> list[int]:
    """Both sides are first cast to one dtype, and scalars on the host are copied to the GPU."""
    condition, left, right = call["condition"], call["self"], call["other"]
    dtype = torch.result_type(left, right)
    device = next((t.device for t in (condition, left, right) if t.device.type != "cpu"), condition.device)
    taken = [tensor.numel() * dtype.itemsize for tensor in (left, right) if tensor.dtype != dtype]
    if device.type != "cpu":
        # a scalar on the host counts only as its copy on the GPU
        taken = [
            tensor.numel() * dtype.itemsize
            for tensor in (left, right)
            if (tensor.device != device and tensor.dim() == 0) or (tensor.device == device and tensor.dtype != dtype)
        ]
        if condition.device != device and condition.dim() == 0:
            taken.append(condition.element_size())
    return [*taken, condition.numel()] if condition.dtype == torch.uint8 else taken


@rule("abs", "angle")
def _absolute(call: Call) -> list[int]:
    """For complex input the result is first made as complex numbers."""
    tensor = call["self"]
    return [size_of(tensor)] if tensor.is_complex() else []


@rule("unfold_backward")
def _unfold_backward(call: Call) -> list[int]:
    """If windows overlap, a tensor of the positions along the axis is made first."""
    grad, dim, size, step = call["grad_in"], call["dim"], call["size"], call["step"]
    if step >= size:
        return []
    dim %= max(1, len(call["input_sizes"]))
    return [8 * min(call["input_sizes"][dim], (grad.shape[dim] - 1) * step + size)]


@storage("_efficientzerotensor")
def _zeros_without_memory(call: Call) -> int:
    return 0


@rule("pow")
def _power(call: Call) -> list[int]:
    """A scalar base is first made a tensor, in the 64-bit dtype of Python's numbers. With a scalar exponent the base
    is first cast to the dtype of the result."""
    overload = call.operator._overloadname
    if overload.startswith("Tensor_Scalar"):
        return cast_by_numbers(call["self"], call["exponent"])
    if not overload.startswith("Scalar"):
        return []
    base = call["self"]
    return [] if base == 1 else [16 if isinstance(base, complex) else 8]


@rule("clamp", "clamp_min", "clamp_max")
def _clamp(call: Call) -> list[int]:
    """Numbers of a higher kind than the tensor's dtype, such as floats for integers, make torch cast the tensor."""
    bounds = [call[name] for name in ("min", "max") if call.has(name)]
    if any(isinstance(bound, torch.Tensor) for bound in bounds):
        return []  # the kernel casts as it reads
    return cast_by_numbers(call["self"], *bounds)


def cast_by_numbers(tensor: torch.Tensor, *numbers: Any) -> list[int]:
    """The cast of a tensor to the dtype that it has together with numbers, where torch's code casts it by itself."""
    given = [number for number in numbers if number is not None]
    dtype = functools.reduce(torch.promote_types, (torch.result_type(tensor, number) for number in given), tensor.dtype)
    return [] if dtype == tensor.dtype else [tensor.numel() * dtype.itemsize]
