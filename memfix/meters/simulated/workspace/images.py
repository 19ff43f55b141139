"""Pooling, resizing, sampling, padding and unfolding of images: mostly contiguous copies of strided tensors."""

from __future__ import annotations

import torch

from .memory_formats import (
    contiguous_only,
    copied_unless_contiguous,
    copied_unless_read_as_it_is,
    copies_unless_in,
    require_contiguous,
    suggested_format,
)
from .rules import Call, NoRule, copies_unless_contiguous, none_needed, rule, size_of, storage

# ---------------------------------------------------------------- pooling over windows
contiguous_only(
    "self",
    *"max_pool3d_with_indices avg_pool3d adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d".split(),
    "adaptive_max_pool2d",
)
contiguous_only("self indices?", *"fractional_max_pool2d fractional_max_pool3d max_unpool2d max_unpool3d".split())
contiguous_only(
    "grad_output self indices?",
    *"_adaptive_avg_pool3d_backward adaptive_max_pool3d_backward".split(),
    *"fractional_max_pool2d_backward fractional_max_pool3d_backward".split(),
)


@rule("max_pool2d_with_indices", "avg_pool2d")
def _pool2d(call: Call) -> list[int]:
    tensor = call["self"]
    return copies_unless_in(suggested_format(tensor), tensor)


@rule("max_pool2d_with_indices_backward", "avg_pool2d_backward")
def _pool2d_backward(call: Call) -> list[int]:
    tensor = call["self"]
    memory_format = suggested_format(tensor)
    if call.has("indices"):
        require_contiguous(call, "indices", memory_format=memory_format)
    return copies_unless_in(memory_format, tensor, call["grad_output"])


@rule("max_pool3d_with_indices_backward", "avg_pool3d_backward", "adaptive_max_pool2d_backward")
def _pool_backward(call: Call) -> list[int]:
    require_contiguous(call, "self", *(["indices"] if call.has("indices") else []))
    return copies_unless_contiguous(call["grad_output"])


# ---------------------------------------------------------------- adaptive pooling
@rule("_adaptive_avg_pool2d")
def _adaptive_average(call: Call) -> list[int]:
    tensor = call["self"]
    if suggested_format(tensor) == torch.channels_last:
        require_contiguous(call, "self", memory_format=torch.channels_last)
        return []
    return copies_unless_contiguous(tensor) if tensor.dim() == 4 else []


@rule("_adaptive_avg_pool2d_backward")
def _adaptive_average_backward(call: Call) -> list[int]:
    # the kernel reads channels last through strides, without a copy
    return (
        [] if suggested_format(call["self"]) == torch.channels_last else copies_unless_contiguous(call["grad_output"])
    )


# ---------------------------------------------------------------- resizing
_RESIZES_IN_TWO_LAYOUTS = "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d".split()
_RESIZES = """upsample_nearest1d _upsample_nearest_exact1d upsample_nearest3d _upsample_nearest_exact3d
    upsample_linear1d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
    _upsample_lanczos2d_aa""".split()


@rule(*_RESIZES_IN_TWO_LAYOUTS)
def _resize_in_two_layouts(call: Call) -> list[int]:
    name = "self" if call.has("self") else "input"
    return copied_unless_read_as_it_is(call, name, memory_format=suggested_format(call[name]))


@rule(*(f"{name}_backward" for name in _RESIZES_IN_TWO_LAYOUTS))
def _resize_in_two_layouts_backward(call: Call) -> list[int]:
    grad = call["grad_output"]
    if list(grad.shape) == list(call["input_size"]):
        require_contiguous(call, "grad_output", memory_format=suggested_format(grad))
    return copies_unless_in(suggested_format(grad), grad)


@rule(*_RESIZES)
def _resize(call: Call) -> list[int]:
    return copied_unless_read_as_it_is(call, "self" if call.has("self") else "input")


copied_unless_contiguous("grad_output", *(f"{name}_backward" for name in _RESIZES))


# ---------------------------------------------------------------- grid sampling
none_needed("grid_sampler_2d grid_sampler_2d_backward grid_sampler_3d grid_sampler_3d_backward")
contiguous_only("self grid grad_output?", "cudnn_grid_sampler", "cudnn_grid_sampler_backward")


# ---------------------------------------------------------------- padding and unfolding
_PADS = [f"{kind}_pad{n}d" for kind in ("reflection", "replication") for n in (1, 2, 3)]
contiguous_only("self", *_PADS)
contiguous_only("grad_output self", *(f"{name}_backward" for name in _PADS))


@rule("im2col", "col2im")
def _unfold(call: Call) -> list[int]:
    tensor = call["self"]
    if tensor.numel() >= 2**31:
        raise NoRule(f"{call.operator} of {tensor.numel():,} elements")
    outgrown = [size_of(tensor)] if size_of(call.outputs) > size_of(tensor) else []
    return [*copies_unless_contiguous(tensor), *outgrown]


@storage("im2col", "col2im")
def _as_large_as_the_input(call: Call) -> int:
    """The result's storage is at least as large as the input, because torch resizes the result after making it."""
    return max(size_of(call["self"]), size_of(call.outputs))
