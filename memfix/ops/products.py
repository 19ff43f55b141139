"""Matrix products into preallocated memory, summed in float32 where the operands have 16 bits."""

from __future__ import annotations

import torch

_UPCAST_ELEMENTS = 1 << 20  # elements of an operand upcast at a time, where the GEMM has no wider output dtype


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` are kept in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)


def autocast_dtype(first: torch.Tensor, *others: torch.Tensor | None) -> torch.dtype | None:
    """Return the dtype to which autocast casts the operands of a matrix product, or None if it leaves them as they are:
    if it is off, or a tensor is float64."""
    device = first.device.type
    if any(tensor is not None and tensor.dtype == torch.float64 for tensor in (first, *others)):
        return None
    is_on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_on else None


def as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as a matrix with one row per token."""
    return tensor.reshape(-1, tensor.shape[-1])


def product_into(
    out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1.0, add: bool = False
) -> None:
    """Write ``out = alpha * left @ right``, or with ``add`` ``out +=``; ``out`` may be float32 for 16-bit operands.

    Each element is summed in float32 or wider and rounded once, to the dtype of ``out``.
    """
    beta = 1 if add else 0
    if 0 in out.shape:
        return
    if out.dtype == left.dtype:
        torch.addmm(out, left, right, beta=beta, alpha=alpha, out=out)
    elif left.is_cuda and torch.version.hip is None:
        # the GEMM writes its float32 accumulator: no 16-bit product, and no second pass to upcast it
        torch.addmm(out, left, right, out_dtype=out.dtype, beta=beta, alpha=alpha, out=out)
    else:
        _upcast_product_into(out, left, right, alpha, beta)


def is_column_major(matrix: torch.Tensor) -> bool:
    return matrix.stride(0) < matrix.stride(1)


def weight_gradient(inputs_NI: torch.Tensor, upstream_NJ: torch.Tensor, column_major: bool) -> torch.Tensor:
    """Return ``inputs^T upstream`` with the strides of the weight: autograd copies gradients with other strides."""
    return (upstream_NJ.T @ inputs_NI).T if column_major else inputs_NI.T @ upstream_NJ


def wide_product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return ``left @ right`` in float32 or wider."""
    out = left.new_empty(left.shape[0], right.shape[1], dtype=sum_dtype(left.dtype))
    product_into(out, left, right)
    return out


def _upcast_product_into(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor, alpha: float, beta: int) -> None:
    """Multiply upcast operands, which rounds no more than a wider output does; upcast the longer one by blocks."""
    block = max(1, _UPCAST_ELEMENTS // max(1, left.shape[1]))
    if right.shape[1] < left.shape[0]:
        wide = right.to(out.dtype)
        for start in range(0, left.shape[0], block):
            part = out[start : start + block]
            torch.addmm(part, left[start : start + block].to(out.dtype), wide, beta=beta, alpha=alpha, out=part)
        return
    wide = left.to(out.dtype)
    for start in range(0, right.shape[1], block):
        part = out[:, start : start + block]
        torch.addmm(part, wide, right[:, start : start + block].to(out.dtype), beta=beta, alpha=alpha, out=part)
