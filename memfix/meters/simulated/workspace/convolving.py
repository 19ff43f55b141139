"""Convolutions: torch's own depthwise kernels have rules; the others run in cuDNN, whose workspace is unknown."""

from __future__ import annotations

import torch

from .memory_formats import fits_32bit_indices, suggested_format
from .rules import Call, NoRule, rule, size_of
from .sums_inside import buffers_of_sum

_CUDNN_DEPTHWISE_CHANNELS = 32  # in half precision, cuDNN may run depthwise convolutions with at least so many channels


@rule("convolution", "_convolution")
def _convolution(call: Call) -> list[int]:
    if 0 in (call["input"].numel(), call["weight"].numel()):
        return []
    _require_native_depthwise(call)
    return []


@rule("convolution_backward")
def _convolution_backward(call: Call) -> list[int]:
    """A strided gradient is copied for the kernels; the copy is freed before the bias gradient is summed."""
    if 0 in (call["input"].numel(), call["weight"].numel()):
        return []
    _require_native_depthwise(call)
    grad = call["grad_output"]
    if call["input"].dim() == 5:
        raise NoRule(f"backward of {_described(call)}, depthwise in 3d")
    copy = 0 if grad.is_contiguous() else size_of(grad)
    if not call["output_mask"][2]:
        return [copy]
    bias_gradient = grad.shape[1] * grad.element_size()
    others = [dim for dim in range(grad.dim()) if dim != 1]
    sums = buffers_of_sum(call.gpu, grad, others)
    return [copy - bias_gradient] if copy - bias_gradient > sum(sums) else sums


@rule("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu")
def _cudnn_convolution(call: Call) -> list[int]:
    image, weight = list(call["self"].shape), list(call["weight"].shape)
    raise NoRule(f"convolution of {image} by {weight}, {call['self'].dtype}: cuDNN chooses its workspace")


def _require_native_depthwise(call: Call) -> None:
    """Raise ``NoRule`` unless torch's own kernel runs: for depthwise convolutions of contiguous tensors."""
    tensor, weight = call["input"], call["weight"]
    if not torch.backends.cudnn.enabled:
        raise NoRule(f"{_described(call)} without cuDNN")
    channels = tensor.shape[1]
    if call["transposed"] or not 1 < call["groups"] == channels or weight.shape[0] % channels:
        raise NoRule(f"{_described(call)}: cuDNN chooses its workspace")
    for operand in (tensor, weight):
        if not fits_32bit_indices(operand) or suggested_format(operand) != torch.contiguous_format:
            raise NoRule(f"{_described(call)}, depthwise: cuDNN chooses its workspace")
        if not operand.is_contiguous():
            raise NoRule(f"{_described(call)}, depthwise, of a tensor that is not contiguous")
    steps = [*call["stride"], *call["stride"]][:2]
    square = len(call["stride"]) == 2 and steps[0] == steps[1]
    one_dimensional = tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[2] == 1)
    if (
        tensor.dtype == torch.float16
        and tensor.dim() < 5
        and channels >= _CUDNN_DEPTHWISE_CHANNELS
        and all(step == 1 for step in call["dilation"])
        and (square or one_dimensional)
    ):
        raise NoRule(f"{_described(call)}, depthwise: cuDNN may be chosen by the shape, and then its workspace")


def _described(call: Call) -> str:
    image, weight = list(call["input"].shape), list(call["weight"].shape)
    return f"{'transposed ' if call['transposed'] else ''}convolution of {image} by {weight}, {call['input'].dtype}"
