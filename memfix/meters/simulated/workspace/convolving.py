"""Convolutions: which kernels torch runs, the contiguous copies that it makes for them, and cuDNN's workspace."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ..gpus import GPU
from .cudnn import Convolution, Part, cudnn_workspace, origin_of_workspace
from .inner_sums import buffers_of_sum
from .layout import meta_like
from .memory_formats import CHANNELS_LAST, fits_32bit_indices, suggested_format
from .rules import Call, Estimated, NoRule, Range, rule, size_of

Shape = tuple[int, ...]

_CUDNN_DEPTHWISE_CHANNELS = 32  # cuDNN may run depthwise convolutions in float16 with at least this many channels


@rule("convolution", "_convolution")
def _convolution(call: Call) -> list[int]:
    if 0 in (call["input"].numel(), call["weight"].numel()) or _is_native_depthwise(call):
        return []
    with torch._C._DisableTorchDispatch():
        run = _CudnnRun(call)
        image = run.contiguous(run.image, run.memory_format)
        output = tuple(_as_image(meta_like(call.outputs)).shape)
        if call["transposed"]:  # torch runs it as the image gradient of the ordinary convolution
            run.image_gradient(output, image)
        else:
            run.forward(output, image)
    return run.hidden(size_of(call.outputs))


@rule("convolution_backward")
def _convolution_backward(call: Call) -> list[int]:
    """The gradients of the input, the weight and the bias are taken one after the other."""
    if 0 in (call["input"].numel(), call["weight"].numel()):
        return []
    if _is_native_depthwise(call):
        return _native_depthwise_backward(call)
    wants_input, wants_weight, wants_bias = call["output_mask"]
    with torch._C._DisableTorchDispatch():
        run = _CudnnRun(call)
        grad = _as_image(meta_like(call["grad_output"]))
        with run.temporaries():
            image = run.contiguous(run.image, run.memory_format) if wants_weight else run.image
            dense_grad = run.contiguous(grad, suggested_format(image))
            if wants_input and call["transposed"]:
                run.forward(tuple(image.shape), dense_grad)
            elif wants_input:
                run.image_gradient(tuple(image.shape), dense_grad)
            if wants_weight:
                run.weight_gradient(*((dense_grad, image) if call["transposed"] else (image, dense_grad)))
        if wants_bias:
            run.allocate(grad.shape[1] * grad.element_size())
            run.allocate_briefly(Range.of(sum(_bias_sums(call.gpu, grad))))
    return run.hidden(sum(size_of(grad) for grad in call.outputs if grad is not None))


@rule("cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu", "cudnn_convolution_add_relu")
def _cudnn_convolution(call: Call) -> list[int]:
    image, weight = list(call["self"].shape), list(call["weight"].shape)
    raise NoRule(f"convolution of {image} by {weight}, {call['self'].dtype}: cuDNN chooses its workspace")


class _Shapes(NamedTuple):
    image: Shape
    weight: Shape
    output: Shape


class _Geometry(NamedTuple):
    padding: Shape
    stride: Shape
    dilation: Shape


class _CudnnRun:
    """Replays torch's allocations for a convolution in cuDNN on meta tensors, and tracks the bytes that are alive."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._live = self._copied = 0
        self._peak = Range.of(0)
        self.image, self.weight = meta_like(call["input"]), meta_like(call["weight"])
        self.geometry = _Geometry(tuple(call["padding"]), tuple(call["stride"]), tuple(call["dilation"]))
        if self.image.dim() == 3:
            self.image = _as_image(self.contiguous(self.image, torch.contiguous_format))
            self.weight = _as_image(self.weight)
            padding, stride, dilation = self.geometry
            self.geometry = _Geometry((0, *padding), (1, *stride), (1, *dilation))
        self.memory_format = _cudnn_format(self.image, self.weight)

    # ---------------------------------------------------------------- bytes
    def hidden(self, result_bytes: int) -> list[int]:
        """The bytes alive at the peak beyond the results. Raises ``Estimated`` if they are not exact."""
        bytes = (self._peak | Range.of(result_bytes)) + -result_bytes
        if not bytes.is_exact:
            why = f"{_described(self._call)}: cuDNN chooses its workspace, {origin_of_workspace(self._call.gpu)}"
            raise Estimated(why, bytes)
        return [bytes.usual]

    def allocate(self, size: int) -> None:
        """Count bytes that stay alive."""
        self._live += size
        self.allocate_briefly(Range.of(0))

    def allocate_briefly(self, bytes: Range) -> None:
        """Count bytes that are freed at once."""
        self._peak |= bytes + self._live

    def contiguous(self, tensor: torch.Tensor, memory_format: torch.memory_format) -> torch.Tensor:
        """``tensor.contiguous(memory_format)``. The copy is freed with the other temporaries."""
        if tensor.is_contiguous(memory_format=memory_format):
            return tensor
        self._copied += size_of(tensor)
        self.allocate(size_of(tensor))
        return tensor.contiguous(memory_format=memory_format)

    @contextlib.contextmanager
    def temporaries(self) -> Iterator[None]:
        """Free the copies that are made inside at the end."""
        outer, self._copied = self._copied, 0
        yield
        self._live -= self._copied
        self._copied = outer

    # ---------------------------------------------------------------- calls of cuDNN
    def forward(self, output: Shape, image: torch.Tensor) -> None:
        self._run("forward", (image, self.weight), _Shapes(tuple(image.shape), tuple(self.weight.shape), output))

    def image_gradient(self, image: Shape, grad: torch.Tensor) -> None:
        self._run("image", (grad, self.weight), _Shapes(image, tuple(self.weight.shape), tuple(grad.shape)))

    def weight_gradient(self, image: torch.Tensor, grad: torch.Tensor) -> None:
        shapes = _Shapes(tuple(image.shape), tuple(self.weight.shape), tuple(grad.shape))
        self._run("weight", (image, grad), shapes)

    def _run(self, part: Part, given: tuple[torch.Tensor, torch.Tensor], shapes: _Shapes) -> None:
        memory_format = _cudnn_format(*given)
        is_last = memory_format != torch.contiguous_format
        convolution = Convolution(part, given[0].dtype, *shapes, is_last, *self.geometry)
        self.allocate(convolution.result_bytes)
        with self.temporaries():
            for tensor in given:
                self.contiguous(tensor, memory_format)
            self.allocate_briefly(cudnn_workspace(self._call.gpu, convolution))


def _cudnn_format(first: torch.Tensor, second: torch.Tensor) -> torch.memory_format:
    """Channels last if one of the two tensors suggests it, except for float64, where cuDNN does not support it."""
    last = CHANNELS_LAST[first.dim()]
    if first.dtype == torch.float64 or last not in (suggested_format(first), suggested_format(second)):
        return torch.contiguous_format
    return last


def _bias_sums(gpu: GPU, grad: torch.Tensor) -> list[int]:
    """The buffers for summing the upstream gradient over all dimensions but the channels."""
    return buffers_of_sum(gpu, grad, [dim for dim in range(grad.dim()) if dim != 1])


def _as_image(tensor: torch.Tensor) -> torch.Tensor:
    """Turn a sequence into an image of one row, as torch does for convolutions in one dimension."""
    return tensor.unsqueeze(2) if tensor.dim() == 3 else tensor


# ---------------------------------------------------------------- depthwise convolutions in torch's own kernels
def _native_depthwise_backward(call: Call) -> list[int]:
    """A strided gradient is copied for the kernels; the copy is freed before the bias gradient is summed."""
    grad = call["grad_output"]
    if call["input"].dim() == 5:
        size = sum(size_of(tensor) for tensor in (grad, call["input"], call["weight"]))
        why = f"backward of {_described(call)}, depthwise in 3d: assumed to take no more than copies of what it reads"
        raise Estimated(why, Range(0, 0, size))
    copy = 0 if grad.is_contiguous() else size_of(grad)
    if not call["output_mask"][2]:
        return [copy]
    bias_gradient = grad.shape[1] * grad.element_size()
    sums = _bias_sums(call.gpu, grad)
    return [copy - bias_gradient] if copy - bias_gradient > sum(sums) else sums


def _is_native_depthwise(call: Call) -> bool:
    """Whether torch certainly runs its own kernel: a depthwise convolution of contiguous tensors not left to cuDNN."""
    tensor, weight = call["input"], call["weight"]
    if not torch.backends.cudnn.enabled:
        raise NoRule(f"{_described(call)} without cuDNN")
    if not fits_32bit_indices(tensor) or not fits_32bit_indices(weight):
        raise NoRule(f"{_described(call)}: torch cuts it in pieces")
    channels = tensor.shape[1]
    if call["transposed"] or not 1 < call["groups"] == channels or weight.shape[0] % channels:
        return False
    if any(suggested_format(operand) != torch.contiguous_format for operand in (tensor, weight)):
        return False
    if _may_run_in_cudnn(call):
        return False
    copies = sum(size_of(operand) for operand in (tensor, weight) if not operand.is_contiguous())
    if copies:
        why = f"{_described(call)}, depthwise, of a tensor that is not contiguous: torch may copy it"
        others = sum(_native_depthwise_backward(call)) if call.has("grad_output") else 0
        raise Estimated(why, Range(0, copies + others, copies + others + size_of(call["input"])))
    return True


def _may_run_in_cudnn(call: Call) -> bool:
    """Whether torch may prefer cuDNN for a contiguous depthwise convolution, by a list of shapes for each GPU."""
    tensor, stride = call["input"], call["stride"]
    is_square = len(stride) == 2 and stride[0] == stride[1]
    is_row = tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[2] == 1)
    is_dilated = any(step != 1 for step in call["dilation"])
    is_wide = tensor.shape[1] >= _CUDNN_DEPTHWISE_CHANNELS
    return tensor.dtype == torch.float16 and tensor.dim() < 5 and is_wide and not is_dilated and (is_square or is_row)


def _described(call: Call) -> str:
    image, weight = list(call["input"].shape), list(call["weight"].shape)
    return f"{'transposed ' if call['transposed'] else ''}convolution of {image} by {weight}, {call['input'].dtype}"
