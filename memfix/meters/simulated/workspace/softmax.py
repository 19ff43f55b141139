"""Softmax and its logarithm, forward and backward."""

from __future__ import annotations

import torch

from .layout import meta_like
from .memory_formats import copied_unless_contiguous
from .rules import Call, copies_unless_contiguous, rule, size_of

copied_unless_contiguous("self", "_softmax", "_log_softmax")
copied_unless_contiguous("grad_output output", "_log_softmax_backward_data")


@rule("_softmax_backward_data")
def _softmax_backward(call: Call) -> list[int]:
    """The kernel makes the product of gradient and output, then reduces it."""
    with torch._C._DisableTorchDispatch():
        product = torch.mul(*(meta_like(call[name]) for name in ("grad_output", "output")))
    return [size_of(product), *copies_unless_contiguous(product, call["output"])]
