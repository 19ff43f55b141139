"""Losses and distances: elementwise results that are made before they are reduced."""

from __future__ import annotations

import math

import torch

from .inner_sums import buffers_of_sum
from .memory_formats import contiguous_only, require_contiguous
from .rules import Call, NoRule, no_kernel, none_needed, rule, size_of, storage, unknown

none_needed("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward")
none_needed("mse_loss_backward smooth_l1_loss_backward huber_loss_backward binary_cross_entropy_backward")

_NO_REDUCTION = 0
_FEW_ROWS = 25  # with more rows, Euclidean ``cdist`` uses a matrix product


@rule("mse_loss", "smooth_l1_loss", "huber_loss")
def _elementwise_loss(call: Call) -> list[int]:
    """The kernel makes the loss of every element, then the sum or mean."""
    tensor, target = call["self"], call["target"]
    if call["reduction"] == _NO_REDUCTION:
        return []
    if tensor.dtype != target.dtype:
        raise NoRule(f"{call.operator} of {tensor.dtype} and {target.dtype}")
    if call.operator.overloadpacket is torch.ops.aten.huber_loss and tensor.shape != target.shape:
        raise NoRule(f"{call.operator} of {list(tensor.shape)} and {list(target.shape)}")
    return _losses_and_their_sum(call, torch.broadcast_shapes(tensor.shape, target.shape), tensor.dtype)


@storage("mse_loss", "smooth_l1_loss", "binary_cross_entropy")
def _loss_of_every_element(call: Call) -> int:
    """The scalar result is written into the storage of the elementwise losses, and keeps all of it."""
    shape = torch.broadcast_shapes(call["self"].shape, call["target"].shape)
    return math.prod(shape) * call["self"].element_size()


@rule("binary_cross_entropy")
def _binary_cross_entropy(call: Call) -> list[int]:
    tensor = call["self"]
    if call["reduction"] == _NO_REDUCTION or tensor.numel() == 0:
        return []
    losses = torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
    return [tensor.element_size(), *buffers_of_sum(call.gpu, losses, [0])]


@rule("multi_margin_loss", "multilabel_margin_loss_forward")
def _margin_loss(call: Call) -> list[int]:
    """The kernel makes one loss per row, already divided for a mean, then their sum."""
    require_contiguous(call, "self", "target")
    tensor = call["self"]
    if call["reduction"] == _NO_REDUCTION or tensor.dim() < 2:
        return []
    return _losses_and_their_sum(call, tensor.shape[:1], tensor.dtype)


contiguous_only("grad_output self target", "multi_margin_loss_backward", "multilabel_margin_loss_backward")
no_kernel("_use_cudnn_ctc_loss _use_miopen_ctc_loss")
unknown("{operator}: the lengths of the sequences decide", "_ctc_loss", "_ctc_loss_backward", "_cudnn_ctc_loss")


def _losses_and_their_sum(call: Call, shape: torch.Size, dtype: torch.dtype) -> list[int]:
    # all elements are summed and they are dense, so their order does not matter
    losses = torch.empty(math.prod(shape), dtype=dtype, device="meta")
    return [size_of(losses), *buffers_of_sum(call.gpu, losses, [0])]


# ---------------------------------------------------------------- distances
@rule("_cdist_forward")
def _cdist(call: Call) -> list[int]:
    left, right = call["x1"], call["x2"]
    _require_equal_batches(call, left, right)
    require_contiguous(call, "x1", "x2")
    mode, longest = call["compute_mode"] or 0, max(left.shape[-2], right.shape[-2])
    if call["p"] == 2 and (mode == 1 or (mode == 0 and longest > _FEW_ROWS)):
        raise NoRule(f"{call.operator} by a matrix product, called as an operator")
    return []


@rule("_cdist_backward")
def _cdist_backward(call: Call) -> list[int]:
    """The gradient for every pair of rows, [B, rows of x2, rows of x1, columns], is made and then summed over x2."""
    left, right = call["x1"], call["x2"]
    _require_equal_batches(call, left, right)
    require_contiguous(call, _upstream(call), "x1", "x2", "cdist")
    if call["p"] == 0 or 0 in (left.numel(), right.numel()):
        return []
    batch, pairs = left.shape[:-2], (right.shape[-2], *left.shape[-2:])
    by_pair = torch.empty(math.prod(batch), *pairs, dtype=left.dtype, device="meta")
    return [size_of(by_pair), *buffers_of_sum(call.gpu, by_pair, [1])]


contiguous_only("self", "_pdist_forward")


@rule("_pdist_backward")
def _pdist_backward(call: Call) -> list[int]:
    tensor = call["self"]
    require_contiguous(call, "self", "pdist")
    if call["p"] == 0 or tensor.numel() == 0 or call[_upstream(call)].numel() == 0:
        return []
    by_pair = torch.empty(tensor.shape[0] - 1, *tensor.shape, dtype=tensor.dtype, device="meta")
    return [size_of(by_pair), *buffers_of_sum(call.gpu, by_pair, [0])]


def _upstream(call: Call) -> str:
    """The name of the upstream gradient's argument, which torch 2.14 renamed."""
    return "grad_output" if call.has("grad_output") else "grad"


def _require_equal_batches(call: Call, left: torch.Tensor, right: torch.Tensor) -> None:
    if left.shape[:-2] != right.shape[:-2]:
        raise NoRule(f"{call.operator} of batches {list(left.shape[:-2])} and {list(right.shape[:-2])}")
