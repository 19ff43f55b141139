"""Makes a product differentiable: its gradients are two products by the same kernel on transposed operands."""

# M rows, N columns, K terms

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..arguments import require_same, require_shape

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Multiplies two matrices of any strides, without an autograd graph."""


def differentiable_product(multiply: Multiply, left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` by ``multiply``, with gradients of any order."""
    require_shape("left", left_MK, "M K")
    require_shape("right", right_KN, "K N")
    require_same("device", left=left_MK.device, right=right_KN.device)
    for name, tensor in (("left", left_MK), ("right", right_KN)):
        if tensor.dtype != torch.float32:
            raise ValueError(f"{name} must be float32, got {tensor.dtype}; use torch.matmul")
    require_same("number of terms K", left=left_MK.shape[1], right=right_KN.shape[0])
    return _Product.apply(multiply, left_MK, right_KN)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, multiply: Multiply, left_MK: torch.Tensor, right_KN: torch.Tensor) -> torch.Tensor:
        ctx.multiply = multiply
        ctx.save_for_backward(left_MK, right_KN)
        return multiply(left_MK, right_KN)

    @staticmethod
    def backward(ctx: Any, gradient_MN: torch.Tensor) -> tuple[None, torch.Tensor | None, torch.Tensor | None]:
        left_MK, right_KN = ctx.saved_tensors
        _, needs_left, needs_right = ctx.needs_input_grad
        left = _laid_out_like(left_MK, ctx.multiply, gradient_MN, right_KN.T) if needs_left else None
        right = _laid_out_like(right_KN, ctx.multiply, left_MK.T, gradient_MN) if needs_right else None
        return None, left, right


def _laid_out_like(operand: torch.Tensor, multiply: Multiply, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right``, transposed in memory if ``operand`` is: otherwise autograd would copy the gradient."""
    is_transposed = operand.stride(0) == 1 and operand.stride(1) >= operand.shape[0]
    return _Product.apply(multiply, right.T, left.T).T if is_transposed else _Product.apply(multiply, left, right)
