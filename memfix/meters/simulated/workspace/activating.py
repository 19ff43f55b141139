"""Activations with kernels of their own."""

from __future__ import annotations

from .memory_formats import contiguous_only
from .rules import none_needed

none_needed("_prelu_kernel _prelu_kernel_backward glu glu_backward log_sigmoid_forward log_sigmoid_backward")
contiguous_only("self noise", "rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional")
