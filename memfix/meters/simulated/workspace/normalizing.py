"""Layer, RMS, group and weight norm: contiguous copies, and the partial sums of parameter gradients over many rows."""

from __future__ import annotations

import math

import torch

from .inner_sums import buffers_of_sum
from .memory_formats import accumulator_bytes, contiguous_only, copied_unless_contiguous
from .rules import Call, NoRule, ceil_div, copies_unless_contiguous, none_needed, rule

none_needed("_weight_norm_interface")
contiguous_only("grad_w", "_weight_norm_interface_backward")

_TILE_COLUMNS, _TILE_ROWS = 32, 32
_SPLIT_ROWS_ABOVE = 65536  # with more, rows are split over blocks too if the columns alone leave half of the GPU idle
_MAX_BLOCKS = 32768


copied_unless_contiguous("input weight bias?", "native_layer_norm", "_fused_rms_norm")


@rule("native_layer_norm_backward")
def _layer_norm_backward(call: Call) -> list[int]:
    wanted = call["output_mask"]
    copies = copies_unless_contiguous(call["grad_out"], call["input"], call["weight"], call["bias"])
    return [
        *copies,
        *_parameter_gradients(call, [name for name, on in zip(("weight", "bias"), wanted[1:], strict=True) if on]),
    ]


@rule("_fused_rms_norm_backward")
def _rms_norm_backward(call: Call) -> list[int]:
    copies = copies_unless_contiguous(call["grad_out"], call["input"], call["weight"])
    return [*copies, *_parameter_gradients(call, ["weight"] if call["output_mask"][1] else [])]


def _parameter_gradients(call: Call, parameters: list[str]) -> list[int]:
    """With many short rows, each block writes its sums to a matrix [blocks, columns], which ``sum(0)`` then reduces.

    Both matrices are alive while the first is reduced, and so are the new gradient and the one it replaces.
    """
    shape = call["normalized_shape"]
    columns = math.prod(shape)
    if columns == 0 or not parameters:
        return []
    rows = call["input"].numel() // columns
    if rows <= _SPLIT_ROWS_ABOVE or columns // _TILE_COLUMNS >= call.gpu.multiprocessors // 2:
        return []
    if len(shape) > 1:
        raise NoRule(f"{call.operator} of {rows:,} rows normalized over {len(shape)} dimensions")
    blocks = min(_MAX_BLOCKS // ceil_div(columns, _TILE_COLUMNS), ceil_div(rows, _TILE_ROWS))
    dtype = call[parameters[0]].dtype
    sums = torch.empty(blocks, columns, dtype=dtype, device="meta")
    matrix, gradient = (count * dtype.itemsize for count in (blocks * columns, columns))
    return [*[matrix] * len(parameters), gradient, *buffers_of_sum(call.gpu, sums, [0])]


# ---------------------------------------------------------------- group norm
@rule("native_group_norm")
def _group_norm(call: Call) -> list[int]:
    """The affine map and the statistics are combined into a scale and a shift per channel."""
    tensor, weight, bias = call["input"], call["weight"], call["bias"]
    if tensor.numel() == 0:
        return []
    _, per_channel = _group_buffers(call, tensor)
    buffers = copies_unless_contiguous(tensor, weight, bias)
    if call["HxW"] > 1 and (weight is not None or bias is not None):
        buffers += [per_channel] * 2
    return buffers


@rule("native_group_norm_backward")
def _group_norm_backward(call: Call) -> list[int]:
    tensor, weight = call["input"], call["weight"]
    if tensor.numel() == 0:
        return []
    per_group, per_channel = _group_buffers(call, tensor)
    buffers = copies_unless_contiguous(call["grad_out"], tensor, call["mean"], call["rstd"], weight)
    buffers += [per_channel] * 2  # two sums over the pixels of each channel
    if call["output_mask"][0]:
        buffers += [per_group] * 2
        if call["HxW"] > 1 and weight is not None:
            buffers.append(per_channel)  # scale of the gradient
    return buffers


def _group_buffers(call: Call, tensor: torch.Tensor) -> tuple[int, int]:
    item = accumulator_bytes(tensor.dtype)
    return call["N"] * call["group"] * item, call["N"] * call["C"] * item
