"""Softmax and its logarithm, forward and backward."""

from __future__ import annotations

import torch

from .memory_formats import copied_unless_contiguous
from .rules import Call, copies_unless_contiguous, none_needed, rule, size_of

none_needed("nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward")
copied_unless_contiguous("self", "_softmax", "_log_softmax")
copied_unless_contiguous("grad_output output", "_log_softmax_backward_data")


@rule("_softmax_backward_data")
def _softmax_backward(call: Call) -> list[int]:
    """The kernel makes the product of gradient and output, then reduces it."""
    with torch._C._DisableTorchDispatch():
        product = torch.mul(*(_without_values(call[name]) for name in ("grad_output", "output")))
    return [size_of(product), *copies_unless_contiguous(product, call["output"])]


def _without_values(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
