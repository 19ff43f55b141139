"""Batch norm by torch's kernels and by cuDNN. ``dispatcher_overrides`` chooses between them as a CUDA build does."""

from __future__ import annotations

import torch

from .layout import merges_into_one
from .memory_formats import (
    accumulator_bytes,
    copies_unless_in,
    fits_32bit_indices,
    require_contiguous,
    suggested_format,
)
from .rules import Call, NoRule, ceil_div, last_power_of_two, none_needed, rule, size_of

none_needed("batch_norm_gather_stats_with_counts")

_BLOCK_THREADS = 512
_TILE_CHANNELS = 32
_ROWS_PER_THREAD = 16
_MAX_ROW_BLOCKS, _MIN_ROW_BLOCKS = 128, 8


# ---------------------------------------------------------------- forward
@rule("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training")
def _native(call: Call) -> list[int]:
    tensor = call["input"]
    training = call["training"] if call.has("training") else False
    if not training:
        if _kernels_for(tensor) == "general" and None in (call["weight"], call["bias"]):
            return [accumulator_bytes(tensor.dtype)] * [call["weight"], call["bias"]].count(None)
        return []
    return _statistics(tensor)


@rule("batch_norm_stats")
def _stats(call: Call) -> list[int]:
    return _statistics(call["input"])


@rule("batch_norm_elemt")
def _elemt(call: Call) -> list[int]:
    require_contiguous(call, "input", memory_format=suggested_format(call["input"]))
    return []


def _statistics(tensor: torch.Tensor) -> list[int]:
    """In channels first, one block sums a channel. In channels last, row blocks exchange partial sums in memory."""
    kernels = _kernels_for(tensor)
    if kernels == "general":
        raise NoRule(f"batch norm of a tensor that is not contiguous, shape {list(tensor.shape)}")
    return _staging(tensor, values_per_channel=4) if kernels == "channels_last" else []


@rule("cudnn_batch_norm")
def _cudnn(call: Call) -> list[int]:
    return _cudnn_training(call["input"]) if call["training"] else []


def _cudnn_training(tensor: torch.Tensor) -> list[int]:
    if suggested_format(tensor) != torch.contiguous_format:
        raise NoRule(f"batch norm of channels last, whose workspace cuDNN chooses, shape {list(tensor.shape)}")
    if not tensor.is_contiguous():
        # cuDNN gets a copy, which is kept for backward instead of the tensor
        raise NoRule(f"batch norm by cuDNN of a tensor that is not contiguous, shape {list(tensor.shape)}")
    return []


# ---------------------------------------------------------------- backward
@rule("cudnn_batch_norm_backward")
def _cudnn_backward(call: Call) -> list[int]:
    tensor = call["input"]
    return [*_cudnn_training(tensor), *copies_unless_in(torch.contiguous_format, call["grad_output"])]


@rule("native_batch_norm_backward")
def _native_backward(call: Call) -> list[int]:
    """Channels first runs one kernel. Other layouts make two sums per channel, then the gradient of the input."""
    grad, tensor, weight = call["grad_out"], call["input"], call["weight"]
    want_input, want_weight, want_bias = call["output_mask"]
    if not (fits_32bit_indices(tensor) and fits_32bit_indices(grad)):
        raise NoRule(f"backward of batch norm over {tensor.numel():,} elements")
    needs_sums = call["train"] or want_weight or want_bias
    channels_last = _kernels_for(tensor) == "channels_last"
    copies = [size_of(t) for t in (tensor, grad) if not _pixels_merge(t)]
    if needs_sums and want_input and not channels_last:
        return copies
    if copies or not want_input:
        raise NoRule(f"backward of batch norm of a tensor that is not contiguous, shape {list(tensor.shape)}")
    item = accumulator_bytes(tensor.dtype)
    # staging buffers are freed before the gradient is made
    buffers = [tensor.shape[1] * item] * 2 if needs_sums else []
    if call["save_invstd"] is not None and call["save_invstd"].numel() == 0:
        buffers.append(tensor.shape[1] * item)
    if call["train"] and weight is None and _kernels_for(grad) != "channels_last":
        buffers.append(item)  # torch makes a weight of one element
    return buffers


@rule("batch_norm_backward_reduce")
def _backward_reduce(call: Call) -> list[int]:
    grad, tensor = call["grad_out"], call["input"]
    if _kernels_for(grad) == _kernels_for(tensor) == "channels_last":
        return _staging(tensor, values_per_channel=2)
    return [size_of(t) for t in (tensor, grad) if not _pixels_merge(t)]


@rule("batch_norm_backward_elemt")
def _backward_elemt(call: Call) -> list[int]:
    require_contiguous(call, "grad_out", "input", memory_format=suggested_format(call["input"]))
    return []


# ---------------------------------------------------------------- choice and launch of kernels
def _kernels_for(tensor: torch.Tensor) -> str:
    if not fits_32bit_indices(tensor):
        return "general"
    if tensor.is_contiguous():
        return "channels_last" if tensor.stride(1) == 1 else "contiguous"
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return "channels_last"
    if tensor.dim() == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        raise NoRule(f"batch norm of channels last in 3d, shape {list(tensor.shape)}")
    return "general"


def _staging(tensor: torch.Tensor, *, values_per_channel: int) -> list[int]:
    """Partial results per row block, and a semaphore per block of channels; [] if one row block suffices."""
    channels = tensor.shape[1]
    rows = tensor.numel() // channels
    block_x = min(last_power_of_two(channels), _TILE_CHANNELS)
    block_y = min(last_power_of_two(ceil_div(rows, _ROWS_PER_THREAD)), _BLOCK_THREADS // block_x)
    if block_x * block_y != _BLOCK_THREADS:
        block_x = min(last_power_of_two(channels), _BLOCK_THREADS // block_y)
    row_blocks = min(ceil_div(rows, block_y * _ROWS_PER_THREAD), _MAX_ROW_BLOCKS)
    if row_blocks < _MIN_ROW_BLOCKS:
        return []
    staging = values_per_channel * channels * row_blocks * accumulator_bytes(tensor.dtype)
    return [staging, ceil_div(channels, block_x) * 4]


def _pixels_merge(tensor: torch.Tensor) -> bool:
    """Whether ``tensor.reshape(N, C, -1)`` can be a view."""
    return merges_into_one(tensor.shape[2:], tensor.stride()[2:])
