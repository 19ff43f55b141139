"""Activations with kernels of their own."""

from __future__ import annotations

from .memory_formats import require_contiguous
from .rules import Call, none_needed, rule

none_needed("_prelu_kernel _prelu_kernel_backward glu glu_backward log_sigmoid_forward log_sigmoid_backward")


@rule("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
def _rrelu(call: Call) -> list[int]:
    require_contiguous(call, "self", "noise")
    return []
